"""The two halves of `PdkvConnector` without a model: real sessions, a real side channel, real caches, vLLM's calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from session_engines import BLOCK, DEADLINE_S, PD, Blocks, Engine, Request, Stuck, arrive, config_of
from vllm.v1.request import RequestStatus

from pdkv.errors import ConfigError
from pdkv.registry import find_transport
from pdkv.transfer import Reference
from pdkv_connectors.vllm.session_scheduler import KEY
from pdkv_connectors.vllm.session_settings import ConnectorSettings

pytestmark = pytest.mark.vllm


@pytest.fixture
def pd() -> Iterator[PD]:
    Stuck.endless = 0
    made = PD()
    yield made
    made.close()


def test_a_prompt_moves_and_both_schedulers_hear_of_it(pd: PD) -> None:
    request = arrive(pd, "d", pd.offer("p", [1, 2, 3], 40), 40)
    pd.load(request, [7, 5, 9, 11])  # one block more than the prompt needs
    pd.until(lambda: pd.decode.received == ["d"] and pd.prefill.sent == ["p"])
    assert not pd.decode.failed
    assert pd.same([1, 2, 3], [7, 5, 9])
    assert not pd.contents(pd.decode, [11]).any()


@pytest.mark.parametrize("cached", [16, 32])
def test_only_blocks_behind_the_cached_prefix_are_read(pd: PD, cached: int) -> None:
    request = arrive(pd, "d", pd.offer("p", [1, 2, 3], 40), 40)
    pd.load(request, [7, 5, 9], cached)
    pd.until(lambda: pd.decode.received == ["d"])
    first = cached // BLOCK
    assert pd.same([1, 2, 3][first:], [7, 5, 9][first:])
    assert not pd.contents(pd.decode, [7, 5, 9][:first]).any()


def test_a_prompt_that_is_cached_whole_ends_the_lease_without_a_read(pd: PD) -> None:
    request = arrive(pd, "d", pd.offer("p", [1, 2], 32), 32)
    pd.load(request, [7, 5], 32)
    pd.until(lambda: pd.prefill.sent == ["p"])
    assert not pd.decode.received
    assert pd.decode.scheduler.host.counts["reads"] == 0


def test_all_ranks_move_their_own_part(pd: PD) -> None:
    both = PD(ranks=2)
    request = arrive(both, "d", both.offer("p", [1, 2], 32), 32)
    both.load(request, [4, 3])
    both.until(lambda: both.decode.received == ["d"])
    assert both.same([1, 2], [4, 3], rank=0)
    assert both.same([1, 2], [4, 3], rank=1)
    assert not torch.equal(both.contents(both.decode, [4], 0), both.contents(both.decode, [4], 1))
    both.close()


def test_a_request_that_ends_in_the_queue_frees_prefill(pd: PD) -> None:
    request = arrive(pd, "d", pd.offer("p", [1], 16), 16)
    request.status = RequestStatus.FINISHED_ABORTED
    assert pd.decode.scheduler.request_finished(request, ([],)) == (False, None)
    pd.until(lambda: pd.prefill.sent == ["p"])
    assert not pd.decode.received


def test_a_prompt_whose_client_had_left_when_it_was_finished_is_freed_at_once(pd: PD) -> None:
    params = pd.offer("p", [1, 2, 3], 40)
    pd.prefill.scheduler.give_up_finished("p", "the client had left")
    pd.prefill.scheduler.give_up_finished("p", "the client had left")
    pd.until(lambda: pd.prefill.sent == ["p"])
    assert pd.prefill.scheduler.holders() == ()
    late = arrive(pd, "d", params, 40)
    pd.load(late, [7, 5, 9])
    pd.until(lambda: pd.decode.failed == ["d"])


def test_a_request_that_was_refused_before_it_was_one_frees_prefill_and_fails_nothing(pd: PD) -> None:
    request = Request("d", 1, pd.offer("p", [1, 2, 3], 40), abort_immediately=True)
    pd.decode.scheduler.on_new_request(request)
    pd.decode.scheduler.request_finished(request, ((),))
    pd.until(lambda: pd.prefill.sent == ["p"])
    assert not pd.decode.failed


def test_I11_a_request_that_ends_while_it_loads_gets_its_blocks_back_only_when_its_read_is_over() -> None:
    pd = PD(decode={"pdkv_rebuild_after_s": 0.5})
    Stuck.endless = 1
    request = arrive(pd, "d", pd.offer("p", [1], 16), 16)
    pd.load(request, [3])
    pd.until(lambda: pd.decode.scheduler.host.counts["reads"] == 1)
    generation = pd.decode.scheduler.generation
    request.status = RequestStatus.FINISHED_ABORTED
    pd.decode.scheduler.request_finished(request, ([3],))
    assert not pd.decode.received
    pd.until(lambda: pd.decode.received == ["d"])
    assert pd.decode.scheduler.generation == generation + 1
    assert pd.decode.scheduler.host.counts["rebuilds"] == 1
    again = arrive(pd, "e", pd.offer("q", [2], 16), 16)
    pd.load(again, [3])
    pd.until(lambda: pd.decode.received == ["d", "e"])
    assert pd.same([2], [3])
    pd.close()


def tampered(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, KEY: {**params[KEY], "num_tokens": 17}}


def nothing(params: dict[str, Any]) -> dict[str, Any]:
    return {"do_remote_prefill": True}


@pytest.mark.parametrize("spoil", [tampered, nothing])
def test_a_request_with_bad_parameters_fails_when_it_has_blocks(pd: PD, spoil: Callable[..., Any]) -> None:
    request = arrive(pd, "d", spoil(pd.offer("p", [1, 2], 32)), 32)
    pd.load(request, [3, 4])
    pd.until(lambda: pd.decode.received == ["d"])
    assert pd.decode.failed == ["d"]


@pytest.mark.parametrize("tokens", [16, 40])
def test_a_prefill_engine_that_is_asked_to_load_fails_the_request_and_gives_its_blocks_back(
    pd: PD, tokens: int
) -> None:
    scheduler = pd.prefill.scheduler
    request = Request("x", tokens, {**pd.offer("p", [1, 2, 3], 40)})
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (tokens, True)
    scheduler.update_state_after_alloc(request, Blocks([4, 5, 6]), tokens)
    pd.until(lambda: pd.prefill.received == ["x"])
    assert pd.prefill.failed == ["x"]
    request.status = RequestStatus.FINISHED_ERROR
    assert scheduler.request_finished(request, ([4, 5, 6],)) == (False, None)
    assert not scheduler._untouched


def test_a_request_that_would_load_and_hand_over_fails_and_ends_nothing_of_prefills(pd: PD) -> None:
    params = pd.offer("p", [1, 2, 3], 40)
    request = arrive(pd, "d", {**params, "do_remote_decode": True}, 40)
    pd.load(request, [7, 5, 9])
    pd.until(lambda: pd.decode.received == ["d"])
    assert pd.decode.failed == ["d"]
    again = arrive(pd, "e", params, 40)
    pd.load(again, [7, 5, 9])
    pd.until(lambda: "e" in pd.decode.received and pd.prefill.sent == ["p"])
    assert pd.decode.failed == ["d"]
    assert pd.same([1, 2, 3], [7, 5, 9])


def test_by_policy_a_request_with_bad_parameters_is_computed_here() -> None:
    pd = PD(policy="recompute")
    request = arrive(pd, "d", {"do_remote_prefill": True}, 32)
    assert pd.decode.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    pd.close()


def test_a_prefill_engine_that_is_gone_fails_the_request() -> None:
    pd = PD(decode={"pdkv_silence_s": 1.0})
    params = pd.offer("p", [1], 16)
    pd.prefill.close()
    request = arrive(pd, "d", params, 16)
    pd.load(request, [3])
    deadline = time.monotonic() + DEADLINE_S
    while not pd.decode.received:
        assert time.monotonic() < deadline
        pd.decode.step()
    assert pd.decode.failed == ["d"]
    pd.decode.close()


def test_a_preempted_request_reads_again_while_its_lease_is_held() -> None:
    pd = PD(decode={"pdkv_hold_s": 60.0})
    request = arrive(pd, "d", pd.offer("p", [1, 2], 32), 32)
    pd.load(request, [3, 4])
    pd.until(lambda: pd.decode.received == ["d"])
    request.num_preemptions = 1
    pd.load(request, [8, 9])
    pd.until(lambda: pd.decode.received == ["d", "d"])
    assert pd.same([1, 2], [8, 9])
    request.status = RequestStatus.FINISHED_STOPPED
    pd.decode.scheduler.request_finished(request, ([8, 9],))
    pd.until(lambda: pd.prefill.sent == ["p"])
    pd.close()


def test_a_preempted_request_whose_lease_is_over_is_computed_here(pd: PD) -> None:
    request = arrive(pd, "d", pd.offer("p", [1], 16), 16)
    pd.load(request, [3])
    pd.until(lambda: pd.decode.received == ["d"])
    request.num_preemptions = 1
    assert pd.decode.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_that_slept_serves_in_a_new_generation(pd: PD, side: str) -> None:
    request = arrive(pd, "d", pd.offer("p", [1], 16), 16)
    pd.load(request, [3])
    pd.until(lambda: pd.decode.received == ["d"] and pd.prefill.sent == ["p"])
    engine: Engine = getattr(pd, side)
    before = engine.scheduler.generation
    engine.scheduler.withdraw_handshake()
    for worker, cache in zip(engine.workers, engine.caches, strict=True):
        worker.unregister()
        cache.release_physical()
        cache.recommit()
        worker.register(cache)
    engine.publish()
    assert engine.scheduler.generation > before
    again = arrive(pd, "e", pd.offer("q", [2], 16), 16)
    pd.load(again, [5])
    pd.until(lambda: pd.decode.received == ["d", "e"])
    assert not pd.decode.failed
    assert pd.same([2], [5])


def test_the_parameters_are_plain_json(pd: PD) -> None:
    params = pd.offer("p", [1], 16)
    passed_on = msgspec.json.decode(msgspec.json.encode(params))
    assert Reference.from_params(passed_on[KEY]) == Reference.from_params(params[KEY])


def test_a_lease_of_no_one_comes_back_by_itself(pd: PD) -> None:
    session = pd.prefill.scheduler.session
    assert session is not None
    pd.offer("p", [1], 16)
    session.prefill_aborted("p#1", "no decode engine has asked")
    pd.until(lambda: pd.prefill.sent == ["p"])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pdkv_transport": "carrier-pigeon"}, "no transport 'carrier-pigeon'"),
        ({"pdkv_hold_s": "soon"}, "pdkv_hold_s must be a number"),
        ({"pdkv_holds_s": 3}, "pdkv_holds_s, which this connector does not know"),
        ({"pdkv_insecure": "perhaps"}, "must be 0 or 1"),
        ({"pdkv_verify": "twice"}, "pdkv_verify must be 0 or 1"),
        ({"pdkv_side_channel": "0.0.0.0:5600"}, "can be reached from other machines"),
    ],
)
def test_wrong_settings_are_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConnectorSettings.of(config_of("kv_producer", **extra), {})


def test_the_environment_is_read_where_the_config_says_nothing() -> None:
    environment = {"PDKV_TRANSPORT": "nixl", "PDKV_SIDE_CHANNEL": "127.0.0.1:7001"}
    found = ConnectorSettings.of(config_of("kv_producer", pdkv_side_channel="127.0.0.1:7002"), environment)
    assert found.transport == "nixl"
    assert str(found.side_channel.bind) == "127.0.0.1:7002"


@pytest.mark.parametrize(
    ("extra", "environment", "verify"),
    [
        ({}, {}, None),
        ({"pdkv_verify": True}, {"PDKV_VERIFY": "0"}, True),
        ({}, {"PDKV_VERIFY": "1"}, True),
        ({"pdkv_verify": 0}, {}, False),
    ],
)
def test_whether_to_verify_is_left_to_the_transport_unless_somebody_says(
    extra: dict[str, Any], environment: dict[str, str], verify: bool | None
) -> None:
    found = ConnectorSettings.of(config_of("kv_producer", **extra), environment)
    assert found.verify is verify
    assert find_transport("nixl", verify=found.verify)().verifies is bool(verify)


def test_data_parallel_ranks_listen_on_ports_of_their_own() -> None:
    config = config_of("kv_producer", pdkv_side_channel="127.0.0.1:7000")
    config.parallel_config.data_parallel_index = 3
    assert str(ConnectorSettings.of(config, {}).side_channel.bind) == "127.0.0.1:7003"
