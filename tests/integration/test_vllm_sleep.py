"""Sleep, wake and weight updates of real vLLM engines with prefill and decode, compared with a stock engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine import GROWABLE, EngineProcess, running
from sleeping_pair import (
    ENVIRONMENT,
    MAX_TOKENS,
    PROMPTS,
    Engines,
    connector,
    new_ids,
    prefill_only,
    require_remote,
    run_pd,
    wait_for,
    wait_for_holders,
)

from pdkv.testing import CONNECTOR_CHECKS
from pdkv.testing.stopping import stopped

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Tokens of a stock vLLM, without any of pdkv's options."""
    with EngineProcess(model, tmp_path_factory.mktemp("stock") / "log") as stock:
        return [answer["tokens"] for answer in stock.generate(PROMPTS, MAX_TOKENS)]


@pytest.fixture(scope="module", params=["Pull", "Push"])
def engines(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A prefill and a decode engine that may sleep."""
    folder = tmp_path_factory.mktemp("pd")
    prefill, decode = (
        EngineProcess(model, folder / f"{role}.log", ENVIRONMENT, **GROWABLE, **connector(role, request.param))
        for role in ("kv_producer", "kv_consumer")
    )
    with running(prefill, decode):
        yield prefill, decode


@pytest.mark.parametrize("which", [0, 1], ids=["prefill sleeps", "decode sleeps"])
def test_an_engine_sleeps_and_wakes_between_requests_and_the_tokens_stay_those_of_a_stock_engine(
    engines: Engines, reference: list[list[int]], which: int
) -> None:
    engine, decode = engines[which], engines[1]
    assert run_pd(engines) == reference
    counts = decode.ask("facts")["counts"]
    awake, resident = engine.ask("sleeping"), engine.ask("memory")
    assert engine.ask("sleep") is None
    asleep = engine.ask("sleeping")
    assert (asleep["state"], asleep["is_sleeping"], asleep["agent"]) == ("asleep", True, None)
    assert asleep["physical_bytes"] == asleep["cached_blocks"] == 0
    assert resident - engine.ask("memory") >= 0.9 * awake["physical_bytes"]
    assert engine.ask("wake") is None
    woken = engine.ask("sleeping")
    assert (woken["state"], woken["is_sleeping"]) == ("running", False)
    assert woken["physical_bytes"] == awake["physical_bytes"]
    assert woken["generation"] > awake["generation"]
    assert woken["agent"] != awake["agent"]
    assert run_pd(engines) == reference
    require_remote(decode, counts)


@pytest.mark.parametrize("engines", ["Pull"], indirect=True)
def test_outputs_are_byte_identical_standard_with_sleep_and_wake_between_and_with_explicit_kv_cache_memory_bytes(
    engines: Engines, reference: list[list[int]], model: Path, tmp_path: Path
) -> None:
    """Standard: as many blocks as warmup leaves room for. `engines` were told ``kv_cache_memory_bytes``."""
    environment = {**ENVIRONMENT, "PDKV_ENGINE_MEMORY": str(3 << 30), "PDKV_CAPACITY_BLOCKS": "400"}
    prefill, decode = (
        EngineProcess(
            model, tmp_path / f"{role}.log", environment, **GROWABLE, **connector(role, "Pull"),
            kv_cache_memory_bytes=None,
        )
        for role in ("kv_producer", "kv_consumer")
    )  # fmt: skip
    with running(prefill, decode):
        assert decode.ask("pool_blocks") != engines[1].ask("pool_blocks")
        standard = json.dumps(run_pd((prefill, decode)))
        for engine in (prefill, decode):
            wait_for(prefill, "held", [])
            assert engine.ask("sleep") is None
            assert engine.ask("wake") is None
        slept = json.dumps(run_pd((prefill, decode)))
    explicit = json.dumps(run_pd(engines))
    assert standard == slept == explicit == json.dumps(reference)


def test_both_sides_sleep_at_once_and_more_than_once(engines: Engines, reference: list[list[int]]) -> None:
    for _ in range(2):
        for engine in engines:
            assert engine.ask("sleep") is None
        for engine in engines:
            assert engine.ask("wake") is None
        assert run_pd(engines) == reference


def test_a_held_lease_refuses_sleep_at_once_and_the_engine_serves_on(
    engines: Engines, reference: list[list[int]]
) -> None:
    prefill, decode = engines
    first_id = new_ids()
    transfer = prefill_only(prefill, PROMPTS[:1], first_id)
    refusal = prefill.ask("sleep")
    assert "LeasesHeldError" in refusal
    assert prefill.ask("held")[0] in refusal
    assert prefill.ask("sleeping")["is_sleeping"] is False
    assert [a["tokens"] for a in decode.generate(PROMPTS[:1], MAX_TOKENS, transfer, first_id)] == reference[:1]
    wait_for(prefill, "held", [])
    assert prefill.ask("sleep") is None
    assert prefill.ask("wake") is None
    assert run_pd(engines) == reference


def test_sleeping_and_waking_twice_changes_nothing(engines: Engines, reference: list[list[int]]) -> None:
    prefill, _ = engines
    assert prefill.ask("sleep") is None
    prefill.ask("sleep")
    assert prefill.ask("sleeping")["state"] == "asleep"
    assert prefill.ask("wake") is None
    assert prefill.ask("wake") is None
    assert run_pd(engines) == reference


def test_a_step_of_an_engine_asleep_is_refused_and_touches_no_memory(
    engines: Engines, reference: list[list[int]]
) -> None:
    _, decode = engines
    assert decode.ask("sleep") is None
    assert "StateError: the KV cache is asleep" in decode.ask("step_worker")
    assert decode.ask("wake") is None
    assert run_pd(engines) == reference


def test_tags_wake_weights_first_and_the_engine_stays_asleep_until_the_cache_is_back(
    engines: Engines, reference: list[list[int]]
) -> None:
    _, decode = engines
    assert decode.ask("sleep", level=2) is None
    assert decode.ask("wake", tags=["weights"]) is None
    between = decode.ask("sleeping")
    assert (between["state"], between["tags"], between["is_sleeping"]) == ("asleep", ["kv_cache"], True)
    assert decode.ask("wake", tags=["kv_cache"]) is None
    assert decode.ask("sleeping")["is_sleeping"] is False
    assert run_pd(engines) == reference


def test_level_2_gives_the_cache_back_as_level_1_does_and_on_a_cpu_keeps_the_weights(
    engines: Engines, reference: list[list[int]]
) -> None:
    """A host has no other place for weights: nothing has to be loaded before the engine serves again."""
    for engine in engines:
        committed, resident = engine.ask("sleeping")["physical_bytes"], engine.ask("memory")
        assert engine.ask("sleep", level=2) is None
        assert engine.ask("sleeping")["tags"] == ["kv_cache", "weights"]
        assert resident - engine.ask("memory") >= 0.9 * committed
        assert engine.ask("wake") is None
    assert run_pd(engines) == reference


def test_the_cache_alone_is_released_and_woken(engines: Engines, reference: list[list[int]]) -> None:
    prefill, _ = engines
    assert prefill.ask("release_kv_cache") is None
    assert prefill.ask("sleeping")["physical_bytes"] == 0
    assert prefill.ask("wake", tags=["kv_cache"]) is None
    assert run_pd(engines) == reference


def test_a_weight_update_that_is_short_of_memory_gets_the_caches_and_peers_come_back(
    engines: Engines, reference: list[list[int]]
) -> None:
    before = [engine.ask("sleeping")["generation"] for engine in engines]
    assert run_pd(engines) == reference
    wait_for(engines[0], "held", [])
    for engine, generation in zip(engines, before, strict=True):
        assert engine.ask("reload_weights") is None
        facts = engine.ask("sleeping")
        assert facts["generation"] > generation
        assert (facts["state"], facts["cached_blocks"]) == ("running", 0)
    assert run_pd(engines) == reference


@pytest.mark.parametrize("awake", [False, True], ids=["asleep", "awake again"])
def test_I10_a_reference_from_before_a_sleep_is_refused_while_prefill_sleeps_and_after_it(
    engines: Engines, reference: list[list[int]], awake: bool
) -> None:
    prefill, decode = engines
    prompt = [[2000 + 500 * awake + place for place in range(70)]]
    first_id = new_ids()
    old = prefill_only(prefill, prompt, first_id)
    wait_for(prefill, "held", [])  # nobody comes for it: its lease ends
    assert prefill.ask("sleep") is None
    if awake:
        assert prefill.ask("wake") is None
    failed = decode.ask("facts")["counts"]["failed_loads"]
    assert decode.generate(prompt, MAX_TOKENS, old, first_id)[0]["finish"] == "error"
    assert decode.ask("facts")["counts"]["failed_loads"] == failed + 1
    assert prefill.process.poll() is None
    prefill.ask("wake")
    assert run_pd(engines) == reference


def test_an_engine_with_a_stopped_peer_sleeps_wakes_and_serves_it_again(
    engines: Engines, reference: list[list[int]]
) -> None:
    for sleeper, peer in (engines, reversed(engines)):
        assert run_pd(engines) == reference
        wait_for(engines[0], "held", [])
        resident = sleeper.ask("memory")
        with stopped(peer.process.pid):
            assert sleeper.ask("sleep") is None
            assert resident - sleeper.ask("memory") > 0.9 * 256 * 2**20
            assert sleeper.ask("wake") is None
            assert sleeper.ask("reload_weights") is None
        assert run_pd(engines) == reference


def test_a_lease_of_a_stopped_peer_refuses_sleep_until_it_has_ended(
    engines: Engines, reference: list[list[int]]
) -> None:
    prefill, decode = engines
    with stopped(decode.process.pid):
        prefill_only(prefill, PROMPTS[:1], new_ids())
        assert "LeasesHeldError" in prefill.ask("sleep")
        wait_for(prefill, "held", [])
        assert prefill.ask("sleep") is None
        assert prefill.ask("wake") is None
    assert run_pd(engines) == reference


def test_decode_with_a_load_under_way_refuses_to_sleep_until_it_has_ended(
    engines: Engines, reference: list[list[int]], request: pytest.FixtureRequest
) -> None:
    """In pull decode's READ is under way, in push prefill's WRITE."""
    prefill, decode = engines
    first_id = new_ids()
    transfer = prefill_only(prefill, PROMPTS[:1], first_id)
    writer = decode if "Pull" in request.node.name else prefill
    writer.ask("hold_transfers", held=True)
    try:
        decode.ask("submit", request_id=str(first_id), prompt=PROMPTS[0], max_tokens=2, transfer=transfer[0])
        wait_for(decode, "unfinished", 1)
        wait_for_holders(decode)
        assert "LeasesHeldError" in decode.ask("sleep")
    finally:
        writer.ask("hold_transfers", held=False)
    wait_for(decode, "unfinished", 0)
    wait_for(decode, "held", [])
    assert decode.ask("sleep") is None
    assert decode.ask("wake") is None
    assert run_pd(engines) == reference


def test_leases_are_ended_for_a_sleep_that_says_so_and_what_was_leased_is_refused_afterwards(
    engines: Engines, reference: list[list[int]]
) -> None:
    prefill, decode = engines
    first_id = new_ids()
    prompt = [[3000 + place for place in range(70)]]
    old = prefill_only(prefill, prompt, first_id)
    assert "LeasesHeldError" in prefill.ask("sleep")
    assert prefill.ask("sleep", mode="abort_transfers") is None
    assert prefill.ask("sleeping")["physical_bytes"] == 0
    assert prefill.ask("wake") is None
    assert decode.generate(prompt, MAX_TOKENS, old, first_id)[0]["finish"] == "error"
    assert run_pd(engines) == reference


@pytest.mark.parametrize("which", [0, 1], ids=["prefill sleeps", "decode sleeps"])
def test_a_transfer_is_ended_for_a_sleep_that_says_so_and_the_peer_is_told_and_waited_for(
    engines: Engines, reference: list[list[int]], request: pytest.FixtureRequest, which: int
) -> None:
    """A transfer that the peer has posted is seen to end only when the sleep has begun."""
    prefill, decode = engines
    sleeper, peer = engines[which], engines[1 - which]
    writer = decode if "Pull" in request.node.name else prefill
    first_id = new_ids()
    prompt = [[3500 + 100 * which + place for place in range(70)]]
    transfer = prefill_only(prefill, prompt, first_id)
    if writer is peer:
        peer.ask("hold_transfers", held=True)
    decode.ask("submit", request_id=str(first_id), prompt=prompt[0], max_tokens=2, transfer=transfer[0])
    with ThreadPoolExecutor(1) as pool:
        slept = pool.submit(sleeper.ask, "sleep", mode="abort_transfers")
        if writer is peer:
            peer.ask("hold_transfers", held=False)
        assert slept.result(60) is None
    assert sleeper.ask("sleeping")["physical_bytes"] == 0
    assert sleeper.ask("wake") is None
    decode.ask("abort", request_id=str(first_id))  # or `LLM` would wait for a request that the sleep has ended
    wait_for(prefill, "held", [])
    wait_for(decode, "held", [])
    assert run_pd(engines) == reference


@pytest.mark.parametrize("rule", CONNECTOR_CHECKS)
def test_the_connector_keeps_to_the_rule(
    engines: Engines, request: pytest.FixtureRequest, tmp_path: Path, rule: str
) -> None:
    """In pull peers read from prefill, in push they write into decode."""
    reads = "Pull" in request.node.name
    owner = engines[0 if reads else 1]
    assert owner.ask("check_connector", rule=rule, folder=str(tmp_path), reads=reads) is None


def test_an_engine_whose_peer_was_killed_while_it_slept_wakes_and_serves(
    engines: Engines, reference: list[list[int]]
) -> None:
    """The last test of the file: one of the engines is gone after it."""
    prefill, decode = engines
    assert run_pd(engines) == reference
    wait_for(prefill, "held", [])
    assert prefill.ask("sleep") is None
    decode.process.kill()
    decode.process.wait(10)
    assert prefill.ask("wake") is None
    assert [answer["tokens"] for answer in prefill.generate(PROMPTS, MAX_TOKENS)] == reference
    assert prefill.ask("sleep") is None
    assert prefill.ask("wake") is None
    assert prefill.ask("sleeping")["state"] == "running"
