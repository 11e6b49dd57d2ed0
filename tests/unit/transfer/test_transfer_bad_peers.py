"""Failures between P and D that begin with a peer: it died, restarted, sleeps, or is of another kind."""

from __future__ import annotations

from typing import Any

import pytest
from transfer_pair import Failed, Loaded, Pair, descriptor, failure, nothing_is_left

from pdkv.errors import StateError
from pdkv.transfer import BlockRun, EngineRef, FailCode, Producer
from pdkv.transfer.actions import PostRead, PostWrite
from pdkv.transfer.messages import Done

pytestmark = pytest.mark.cpu

MODES = pytest.mark.parametrize("mode", ["pull", "push"])


@MODES
def test_a_prefill_that_dies_fails_the_request_when_three_renewals_were_not_answered(mode: str) -> None:
    pair = Pair(mode)
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.deliver()
    pair.lose = lambda message: message.receiver.engine_id == "P/1"
    pair.wait(21)
    assert failure(pair) is FailCode.PEER_LOST
    pair.wait(100)
    assert pair.decode.next_deadline() is None
    assert pair.freed("P") == {1, 2, 3}


@MODES
def test_a_prefill_that_restarts_on_the_same_address_fails_the_requests_of_the_old_one_at_once(mode: str) -> None:
    pair = Pair(mode)
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.decode.arrived("e", pair.prefilled("s", (4, 5, 6)), 40)
    pair.deliver()
    pair.prefill = Producer(pair.prefill_clock, EngineRef("P/2", 1), descriptor())
    pair.wait(5)
    assert {(action.request_id, action.code) for action in pair.seen(Failed)} == {
        ("d", FailCode.WRONG_ENGINE),
        ("e", FailCode.WRONG_ENGINE),
    }
    pair.decode.arrived("f", pair.prefilled("t"), 40)
    pair.decode.allocated("f", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    pair.transfer_ended()
    assert [action.request_id for action in pair.seen(Loaded)] == ["f"]


@pytest.mark.parametrize(
    "where", [{"dtype": "bfloat16"}, {"block_size": 32}, {"cache_dtype": "fp8"}, {"connector": "2"}]
)
@MODES
def test_a_peer_of_another_kind_fails_only_the_request_that_needs_it(mode: str, where: dict[str, Any]) -> None:
    pair = Pair(mode, decode_differs=where)
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    (action,) = pair.seen(Failed)
    assert action.code is FailCode.INCOMPATIBLE
    assert next(iter(where)) in action.reason
    assert pair.freed("P") == {1, 2, 3}
    assert nothing_is_left(pair)
    pair.decode.descriptor = descriptor()  # another request, of a decode that fits
    pair.decode.arrived("e", pair.prefilled("s", (4, 5, 6)), 40)
    pair.decode.allocated("e", (BlockRun(0, (21, 22, 23)),))
    pair.deliver()
    pair.transfer_ended()
    assert [loaded.request_id for loaded in pair.seen(Loaded)] == ["e"]


@MODES
def test_I10_a_reference_from_before_prefill_slept_is_refused_before_anything_is_posted(mode: str) -> None:
    pair = Pair(mode)
    reference = pair.prefilled()
    pair.prefill.prefill_aborted("r", "going to sleep")
    pair.prefill.sleep()
    pair.prefill.wake(2, descriptor())
    pair.decode.arrived("d", reference, 40)
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    assert failure(pair) is FailCode.STALE_GENERATION
    assert not pair.seen(PostRead)
    assert not pair.seen(PostWrite)
    assert nothing_is_left(pair)


@MODES
def test_a_request_for_a_prefill_that_is_asleep_fails_at_once(mode: str) -> None:
    pair = Pair(mode)
    reference = pair.prefilled()
    pair.prefill.prefill_aborted("r", "going to sleep")
    pair.prefill.sleep()
    pair.decode.arrived("d", reference, 40)
    pair.deliver()
    assert failure(pair) is FailCode.ASLEEP
    with pytest.raises(StateError, match="asleep"):
        pair.prefilled("s")
    with pytest.raises(StateError, match="asleep already"):
        pair.prefill.sleep()
    with pytest.raises(StateError, match="rise"):
        pair.prefill.wake(1, descriptor())


@MODES
def test_the_late_word_of_a_prefill_that_slept_ends_no_request_that_names_what_it_is_now(mode: str) -> None:
    """Decode was stopped meanwhile, and finds the word and the new request at once."""
    pair = Pair(mode)
    pair.loading()
    pair.transfer_ended()
    pair.prefill.sleep()
    pair.prefill.wake(2, descriptor())
    reference = pair.prefilled("s", (4, 5, 6))
    pair.decode.arrived("e", reference, 40)
    pair.decode.allocated("e", (BlockRun(0, (21, 22, 23)),))
    pair.deliver()
    pair.transfer_ended()
    assert not pair.seen(Failed)
    assert pair.seen(Loaded)[-1].request_id == "e"


@MODES
def test_prefill_does_not_sleep_while_blocks_are_held_and_says_for_whom(mode: str) -> None:
    pair = Pair(mode)
    pair.loading()
    with pytest.raises(StateError, match=r"1 requests hold leases \(r\)"):
        pair.prefill.sleep()
    pair.transfer_ended()
    pair.prefill.sleep()
    assert pair.prefill.asleep


def test_prefill_that_wants_its_blocks_back_gets_them_when_decode_has_stopped_reading() -> None:
    pair = Pair("pull")
    pair.loading()
    pair.prefill.prefill_aborted("r", "prefill shuts down")
    pair.deliver()
    assert failure(pair) is FailCode.PREFILL_ABORTED
    assert pair.freed("P") == pair.freed("D") == set()
    pair.transfer_ended()
    assert pair.freed("P") == {1, 2, 3}
    assert pair.freed("D") == {11, 12, 13}
    pair.wait(5)
    assert nothing_is_left(pair)


@MODES
def test_prefill_that_wants_back_blocks_held_for_rereads_gets_them_and_nobody_reads_again(mode: str) -> None:
    pair = Pair(mode, settings={"hold_s": 60.0})
    pair.loading()
    pair.transfer_ended()
    pair.prefill.prefill_aborted("r", "prefill shuts down")
    pair.deliver()
    assert pair.freed("P") == {1, 2, 3}
    assert not pair.decode.preempted("d")
    assert not pair.seen(Failed)


def test_prefill_that_is_aborted_before_it_has_finished_fails_the_decode_that_registered() -> None:
    pair = Pair("push")
    pair.decode.arrived("d", pair.prefill.expect("r", 40), 40)
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    pair.prefill.prefill_aborted("r", "client gone on prefill")
    pair.deliver()
    assert failure(pair) is FailCode.PREFILL_ABORTED
    assert pair.freed("D") == {11, 12, 13}


def test_a_decode_that_restarts_does_not_take_what_was_meant_for_the_old_one() -> None:
    pair = Pair("push")
    pair.loading()
    key = pair.posted().key
    meant_for_the_old_one = Done(sender=EngineRef("P/1", 1), receiver=EngineRef("D/0", 1), key=key)
    pair.decode.received(meant_for_the_old_one)
    pair.deliver()
    assert not pair.seen(Loaded)
    assert pair.decode.counters["unexpected_messages"] == 1


@MODES
def test_a_host_that_knows_of_a_peers_death_fails_its_requests_at_once(mode: str) -> None:
    pair = Pair(mode)
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.deliver()
    pair.decode.peer_lost("P/1", FailCode.PEER_LOST, "remote disconnected")
    pair.deliver()
    assert failure(pair) is FailCode.PEER_LOST
