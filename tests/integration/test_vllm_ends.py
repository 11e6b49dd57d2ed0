"""Every way in which a request can end between two real engines that live releases both sides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from ends_pair import BLOCK, LEASE_S, Pair, running_pair

from pdkv.testing.stopping import stopped

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=["Pull", "Push"])
def pair(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running_pair(model, tmp_path_factory.mktemp("ends"), request.param) as pair:
        yield pair


@contextlib.contextmanager
def ending_within_a_second(pair: Pair) -> Iterator[None]:
    """One request ends its lease in here, in less than a second by the clock of decode.

    Decode says that it has its KV once more, and counts that, when prefill has not confirmed it within a second.
    """
    ended, repeated = pair.counts("prefill").get("leases_ended_by_decode", 0), pair.counts("decode").get("resent", 0)
    expired = pair.counts("prefill").get("leases_expired", 0)
    yield
    assert pair.both_are_free()
    assert pair.counts("decode").get("resent", 0) == repeated
    assert pair.counts("prefill")["leases_ended_by_decode"] == ended + 1
    assert pair.counts("prefill").get("leases_expired", 0) == expired


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK])
def test_a_finished_request_ends_its_lease_within_a_second(pair: Pair, length: int) -> None:
    prompt = pair.prompt(length)
    with ending_within_a_second(pair):
        tokens = pair.run(prompt)
    assert tokens == pair.alone(prompt)


def test_a_prompt_that_decode_has_cached_whole_ends_its_lease_as_well(pair: Pair) -> None:
    prompt = pair.prompt(3 * BLOCK)
    first = pair.run(prompt)
    with ending_within_a_second(pair):
        assert pair.run(prompt) == first


@pytest.mark.parametrize("cached", [1, 2, 3])
def test_blocks_are_paired_by_index_behind_a_cached_prefix_of_any_length(pair: Pair, cached: int) -> None:
    prompt = pair.prompt(3 * BLOCK + 5)
    pair.alone(prompt[: cached * BLOCK])
    tokens = pair.run(prompt)
    assert tokens == pair.alone(prompt)
    assert pair.both_are_free()


def test_two_requests_at_the_same_time_do_not_disturb_each_other(pair: Pair) -> None:
    prompts = [pair.prompt(2 * BLOCK), pair.prompt(3 * BLOCK + 1)]
    transfers = [pair.prefilled(prompt) for prompt in prompts]
    ids = [pair.submitted(prompt, transfer) for prompt, transfer in zip(prompts, transfers, strict=True)]
    found = [pair.outcome(request_id)["tokens"] for request_id in reversed(ids)][::-1]
    assert pair.both_are_free()
    assert found == [pair.alone(prompt) for prompt in prompts]


def test_a_request_that_decode_refuses_before_it_is_scheduled_releases_prefill(pair: Pair) -> None:
    prompt = pair.prompt(2 * BLOCK)
    pair.submitted(prompt, pair.prefilled(prompt), steps=0)
    assert pair.both_are_free()


def test_a_client_that_is_gone_when_its_prompt_is_finished_releases_prefill_at_once(pair: Pair) -> None:
    prompt = pair.prompt(2 * BLOCK)
    aborted = pair.counts("prefill").get("leases_aborted", 0)
    pair.prefill.ask("abort_in_core", request_id=pair.prefilled(prompt)["remote_request_id"])
    assert pair.both_are_free()
    assert pair.counts("prefill")["leases_aborted"] == aborted + 1
    assert pair.run(prompt) == pair.alone(prompt)


def test_a_client_that_leaves_during_the_transfer_releases_both_sides_once_it_has_ended(pair: Pair) -> None:
    mover = pair.decode if pair.mode == "Pull" else pair.prefill
    prompt, free = pair.prompt(4 * BLOCK), pair.all_blocks()
    transfer = pair.prefilled(prompt)
    mover.ask("hold_transfers", held=True)
    request_id = pair.submitted(prompt, transfer)
    assert mover.ask("until", path=["transfers"], value=1, within_s=10)["found"] == 1
    pair.decode.ask("abort", request_id=request_id)
    assert pair.until("decode", "quarantined_blocks", value=4)
    assert pair.has_free_blocks(free - 4)
    mover.ask("hold_transfers", held=False)
    assert pair.both_are_free()
    assert pair.has_free_blocks(free)
    assert pair.run(prompt) == pair.alone(prompt)


def test_a_transfer_that_cannot_be_posted_fails_its_request_at_once_and_on_both_sides(pair: Pair) -> None:
    mover = pair.decode if pair.mode == "Pull" else pair.prefill
    prompt, free = pair.prompt(2 * BLOCK), pair.all_blocks()
    transfer = pair.prefilled(prompt)
    mover.ask("refuse_posts", refused=True)
    outcome = pair.outcome(pair.submitted(prompt, transfer))
    mover.ask("refuse_posts", refused=False)
    assert outcome["reason"] == "error"
    assert pair.both_are_free()
    assert pair.has_free_blocks(free)
    assert pair.counts("decode")["failed_post_failed"] == 1
    assert pair.run(prompt) == pair.alone(prompt)


def test_I11_blocks_of_a_transfer_that_never_ends_are_freed_only_after_the_agent_was_rebuilt(pair: Pair) -> None:
    side, mover = ("decode", pair.decode) if pair.mode == "Pull" else ("prefill", pair.prefill)
    prompt, free = pair.prompt(4 * BLOCK), pair.all_blocks()
    transfer = pair.prefilled(prompt)
    mover.ask("hold_transfers", held=True)
    request_id = pair.submitted(prompt, transfer)
    assert mover.ask("until", path=["transfers"], value=1, within_s=10)["found"] == 1
    pair.decode.ask("abort", request_id=request_id)
    assert pair.until("decode", "quarantined_blocks", value=4)
    assert pair.until(side, "generation", value=2, timeout_s=30)
    mover.ask("hold_transfers", held=False)
    assert pair.both_are_free(timeout_s=30)
    assert pair.has_free_blocks(free)
    assert pair.counts(side)["agent_rebuilds"] == 1
    assert pair.run(prompt) == pair.alone(prompt)


def test_a_lease_that_ran_out_before_decode_asked_fails_the_request_and_gives_no_tokens(pair: Pair) -> None:
    prompt = pair.prompt(2 * BLOCK)
    expired = pair.counts("prefill").get("leases_expired", 0)
    transfer = pair.prefilled(prompt)
    assert pair.until("prefill", "counters", "leases_expired", value=expired + 1, timeout_s=2 * LEASE_S)
    outcome = pair.outcome(pair.submitted(prompt, transfer))
    assert (outcome["reason"], outcome["tokens"]) == ("error", [])
    assert pair.both_are_free()


def test_transfer_parameters_that_are_used_twice_fail_the_second_request_only(pair: Pair) -> None:
    prompt = pair.prompt(2 * BLOCK)
    transfer = pair.prefilled(prompt)
    first = pair.outcome(pair.submitted(prompt, dict(transfer)))
    assert pair.outcome(pair.submitted(prompt, dict(transfer)))["reason"] == "error"
    assert pair.both_are_free()
    assert first["tokens"] == pair.alone(prompt)


#: What a peer or a proxy may have done to the parameters of a transfer.
CHANGES: dict[str, dict[str, object]] = {
    "another version": {"version": 2},
    "other tokens": {"num_tokens": 63},
    "other blocks": {"blocks": [[0, [1, 2]]]},
    "another request": {"request_id": "another"},
    "other ranks": {"ranks": []},
}


def test_parameters_of_another_version_or_altered_fail_their_request_only(pair: Pair) -> None:
    for name, change in CHANGES.items():
        prompt, other = pair.prompt(2 * BLOCK), pair.prompt(2 * BLOCK)
        transfer = pair.prefilled(prompt)
        transfer["pdkv"].update(change)
        assert pair.outcome(pair.submitted(prompt, transfer))["reason"] == "error", name
        assert pair.run(other) == pair.alone(other), name
    # decode had no right to end their leases, which run out; all at once, since each is waited for as long
    assert pair.until("prefill", "held_requests", value=0, timeout_s=2 * LEASE_S)


def test_a_prefill_that_stops_for_a_while_delays_its_requests_and_no_more(pair: Pair) -> None:
    prompt = pair.prompt(2 * BLOCK)
    transfer = pair.prefilled(prompt)
    with stopped(pair.prefill.process.pid):
        request_id = pair.submitted(prompt, transfer)
        assert pair.outcome(request_id, timeout_s=1) is None
    assert pair.outcome(request_id)["reason"] == "length"
    assert pair.both_are_free()


def test_a_prefill_that_stops_for_long_fails_its_requests_and_is_free_of_them_when_it_goes_on(pair: Pair) -> None:
    prompt, other = pair.prompt(2 * BLOCK), pair.prompt(2 * BLOCK)
    transfer = pair.prefilled(prompt)
    with stopped(pair.prefill.process.pid):
        assert pair.outcome(pair.submitted(prompt, transfer))["reason"] == "error"
        assert pair.until("decode", "held_requests", value=0)
    assert pair.both_are_free(timeout_s=LEASE_S)
    assert pair.run(other) == pair.alone(other)
