"""Failures between P and D that begin with what a peer says: it cannot be, comes twice or from another one, is lost."""

from __future__ import annotations

from typing import Any

import pytest
from transfer_pair import Failed, Loaded, Pair, failure, nothing_is_left

from pdkv.transfer import BlockRun, EngineRef, FailCode, LeaseSettings, ProducerSettings, TransferKey
from pdkv.transfer.actions import PostRead, PostWrite, Recompute
from pdkv.transfer.messages import Abort, Ack, Cancel, Done, Fail, Handshake, Register, Renew, Renewed

pytestmark = pytest.mark.cpu

MODES = pytest.mark.parametrize("mode", ["pull", "push"])


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
