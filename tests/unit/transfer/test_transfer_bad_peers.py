"""Failures between P and D that begin with a peer: it died, restarted, or says what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from transfer_pair import Failed, Loaded, Pair, descriptor, failure, nothing_is_left

from pdkv.errors import StateError
from pdkv.transfer import BlockRun, EngineRef, FailCode, LeaseSettings, Producer, ProducerSettings, TransferKey
from pdkv.transfer.actions import PostRead, PostWrite, Recompute
from pdkv.transfer.messages import Abort, Ack, Cancel, Done, Fail, Handshake, Register, Renew, Renewed

pytestmark = pytest.mark.cpu

MODES = pytest.mark.parametrize("mode", ["pull", "push"])


# Peers.


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


# What a peer says that cannot be.


@pytest.mark.parametrize("blocks", [(11, 12, 100), (0, 11, 12), (11, 11, 12)])
@MODES
def test_block_ids_that_decode_cannot_have_are_refused_before_anything_is_posted(
    mode: str, blocks: tuple[int, ...]
) -> None:
    pair = Pair(mode)
    pair.loading(blocks)
    assert failure(pair) is FailCode.BAD_BLOCKS
    assert not pair.seen(PostRead)
    assert not pair.seen(PostWrite)
    assert {1, 2, 3} <= pair.freed("P")


def test_block_ids_beyond_prefills_committed_count_are_not_read() -> None:
    pair = Pair("pull")
    reference = pair.prefilled(blocks=(1, 2, 100))
    pair.decode.arrived("d", reference, 40)
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    assert failure(pair) is FailCode.BAD_BLOCKS
    assert not pair.seen(PostRead)


@MODES
def test_more_blocks_than_prefill_has_are_refused_and_not_paired_from_an_end(mode: str) -> None:
    pair = Pair(mode)
    pair.loading((11, 12, 13, 14))
    assert failure(pair) is FailCode.BAD_BLOCKS
    assert pair.freed("D") == {11, 12, 13, 14}
    assert pair.freed("P") == {1, 2, 3}


@MODES
def test_prompts_of_different_length_on_the_two_sides_are_refused(mode: str) -> None:
    pair = Pair(mode)
    pair.decode.arrived("d", pair.prefilled(num_tokens=40), 41)
    pair.deliver()
    assert failure(pair) is FailCode.BAD_BLOCKS
    assert pair.freed("P") == {1, 2, 3}


@MODES
def test_a_reference_that_was_used_is_refused_and_leaves_the_first_use_alone(mode: str) -> None:
    pair = Pair(mode)
    reference = pair.loading()
    pair.decode.arrived("again", reference, 40)
    pair.deliver()
    (action,) = pair.seen(Failed)
    assert (action.request_id, action.code) == ("again", FailCode.REPLAYED)
    pair.transfer_ended()
    assert [loaded.request_id for loaded in pair.seen(Loaded)] == ["d"]


def test_orphan_registrations_fill_no_table_and_end_by_themselves() -> None:
    pair = Pair("push", prefill_settings=ProducerSettings(max_early=10, early_s=60))
    me, peer = EngineRef("P/1", 1), EngineRef("D/9", 1)
    for number in range(50):
        key, runs = TransferKey(f"orphan-{number}", number, 0), (BlockRun(0, (1,)),)
        ends: dict[str, Any] = {"sender": peer, "receiver": me}
        claim = pair.prefill.expect(key.request_id, 1).claim(number)
        pair.prefill.received(Register(**ends, key=key, claim=claim, num_tokens=1, runs=runs, remaining_s=500.0))
        key = TransferKey(f"done-{number}", number, 0)
        pair.prefill.received(Done(**ends, key=key, claim=pair.prefill.expect(key.request_id, 1).claim(number)))
    pair.collect()
    assert [message.code for message in pair.said(Fail)] == [FailCode.NO_ROOM] * 40
    assert len(pair.prefill._unwanted) <= 10
    pair.wait(61)
    assert pair.prefill.counters["orphaned_registrations"] == 10
    pair.wait(70)
    assert nothing_is_left(pair)


def test_messages_for_unknown_transfers_are_acknowledged_counted_and_change_nothing() -> None:
    pair = Pair("push")
    pair.loading()
    before = len(pair.did)
    P, D, key = EngineRef("P/1", 1), EngineRef("D/1", 1), TransferKey("nobody", 99, 0)
    for message in (
        Done(sender=P, receiver=D, key=key),
        Fail(sender=P, receiver=D, key=key, code=FailCode.POST_FAILED, reason=""),
        Abort(sender=P, receiver=D, key=key, reason=""),
        Ack(sender=P, receiver=D, key=key, of="ABORT"),
        Register(sender=P, receiver=D, key=key, num_tokens=1, runs=(), remaining_s=1.0),
        Renewed(sender=P, receiver=D, key=key, sequence=1, state="live", remaining_s=1.0),  # type: ignore[arg-type]
    ):
        pair.decode.received(message)
    for answer in (
        Cancel(sender=D, receiver=P, key=key),
        Ack(sender=D, receiver=P, key=key, of="DONE"),
        Renewed(sender=D, receiver=P, key=key, sequence=1, state="live", remaining_s=1.0),  # type: ignore[arg-type]
    ):
        pair.prefill.received(answer)
    pair.decode.read_ended(key, True)
    pair.prefill.write_ended(key, True)
    pair.deliver()
    assert len(pair.did) == before
    assert pair.decode.counters["unexpected_messages"] == pair.prefill.counters["unexpected_messages"] == 1
    pair.transfer_ended()
    assert pair.seen(Loaded)


def test_a_prefill_that_can_hold_no_more_leases_frees_the_blocks_and_decode_hears_of_it() -> None:
    pair = Pair("pull", prefill_settings=ProducerSettings(lease=LeaseSettings(max_leases=1)))
    pair.prefilled("first", (4, 5, 6))
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.deliver()
    assert pair.freed("P") == {1, 2, 3}
    assert failure(pair) is FailCode.LEASE_LOST
    assert pair.prefill.counters["lease_table_full"] == 1


@MODES
def test_every_message_may_be_lost_once_and_everything_still_ends(mode: str) -> None:
    pair = Pair(mode)
    seen: set[tuple[type, object]] = set()

    def lose_first(message: object) -> bool:
        name = (type(message), getattr(message, "of", ""))
        first = name not in seen
        seen.add(name)
        return first

    pair.lose = lose_first
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.deliver()
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    while not pair.seen(PostRead if mode == "pull" else PostWrite):
        pair.wait(1)
    pair.transfer_ended()
    pair.wait(20)
    assert pair.seen(Loaded)
    assert pair.freed("P") == {1, 2, 3}
    assert nothing_is_left(pair)
    assert {Handshake, Renew, Done} <= {kind for kind, _ in seen}


def test_the_watchdog_recomputes_where_the_policy_says_so_in_other_blocks() -> None:
    pair = Pair("push", settings={"on_failure": "recompute"})
    pair.loading()
    pair.wait(121)
    (action,) = pair.seen(Recompute)
    assert action.code is FailCode.TIMED_OUT
    assert pair.freed("D") == set()  # the WRITE may still come
    pair.transfer_ended()
    assert pair.freed("D") == {11, 12, 13}


@MODES
def test_what_another_engine_says_of_a_transfer_is_counted_and_changes_nothing(mode: str) -> None:
    pair = Pair(mode)
    pair.loading()
    key, intruder = pair.posted().key, {"sender": EngineRef("P/9", 1), "receiver": EngineRef("D/1", 1)}
    for message in (
        Done(**intruder, key=key),
        Fail(**intruder, key=key, code=FailCode.TRANSFER_FAILED, reason=""),
        Abort(**intruder, key=key, reason=""),
        Ack(**intruder, key=key, of="REGISTER"),
        Renewed(**intruder, key=key, sequence=1, state="ended", remaining_s=0.0),  # type: ignore[arg-type]
    ):
        pair.decode.received(message)
    pair.deliver()
    assert pair.decode.counters["impostors"] == 5
    assert not pair.seen(Failed)
    pair.transfer_ended()
    assert pair.seen(Loaded)


def test_I11_an_acknowledgement_of_another_engine_frees_no_block_in_quarantine() -> None:
    pair = Pair("push")
    pair.loading()
    key = pair.posted().key
    pair.lose = lambda message: message.receiver.engine_id == "P/1"
    pair.decode.gone("d", "client gone")
    pair.deliver()
    pair.decode.received(Ack(sender=EngineRef("P/9", 1), receiver=EngineRef("D/1", 1), key=key, of="ABORT"))
    pair.collect()
    assert pair.freed("D") == set()
    pair.lose = lambda message: False
    pair.transfer_ended()
    pair.wait(10)
    assert pair.freed("D") == {11, 12, 13}
