"""What goes wrong between prefill and decode, one report from the field per test, and how the request ends."""

from __future__ import annotations

from typing import Any

import pytest
from transfer_pair import AddPeer, Failed, Loaded, Pair, RebuildAgent, descriptor, failure, nothing_is_left

from pdkv.transfer import BlockRun, EngineRef, FailCode, TransferKey
from pdkv.transfer.actions import PostRead, PostWrite
from pdkv.transfer.messages import Done, Fail, Register, Renew, Renewed

pytestmark = pytest.mark.cpu

MODES = pytest.mark.parametrize("mode", ["pull", "push"])


# Transfers.


@MODES
@pytest.mark.parametrize("posted", [True, False])
def test_a_transfer_that_fails_or_cannot_be_posted_fails_the_request_within_one_round_trip(
    mode: str, posted: bool
) -> None:
    pair = Pair(mode)
    pair.loading()
    pair.transfer_ended(ok=False, posted=posted)
    assert failure(pair) is (FailCode.TRANSFER_FAILED if posted else FailCode.POST_FAILED)
    assert pair.freed("D") == {11, 12, 13}
    assert pair.freed("P") == {1, 2, 3}
    assert pair.clock.now == 0
    assert nothing_is_left(pair)


@MODES
def test_I11_a_transfer_that_never_ends_fails_the_request_and_has_the_agent_rebuilt(mode: str) -> None:
    pair = Pair(mode)
    pair.loading()
    pair.wait(119)
    assert not pair.seen(Failed)
    pair.wait(2)
    assert failure(pair) is FailCode.TIMED_OUT
    assert pair.freed("D") == set()
    pair.wait(31)
    assert pair.seen(RebuildAgent)
    assert pair.freed("D") == set()
    endpoint = pair.decode if mode == "pull" else pair.prefill
    endpoint.agent_rebuilt(2, descriptor())
    pair.deliver()
    assert pair.freed("D") == {11, 12, 13}
    assert pair.freed("P") == {1, 2, 3}
    assert endpoint.counters["agent_rebuilds"] == 1
    pair.wait(70)
    assert nothing_is_left(pair)


@MODES
def test_other_requests_survive_the_rebuilding_of_decodes_agent(mode: str) -> None:
    pair = Pair(mode)
    pair.loading()
    first = pair.posted()
    pair.decode.agent_rebuilt(2, descriptor())
    pair.deliver()
    second = pair.posted()
    assert second.key.transfer_id > first.key.transfer_id
    assert second.pairs == first.pairs
    if isinstance(first, PostWrite):  # the old one fails: its keys are worth nothing
        pair.prefill.write_ended(first.key, False)
    pair.transfer_ended()
    assert pair.seen(Loaded)
    assert pair.freed("P") == {1, 2, 3}
    added = [action for action in pair.seen(AddPeer) if action.peer.engine_id == "D/1"]
    assert [(action.peer.generation, action.replaces) for action in added] == [(1, None), (2, EngineRef("D/1", 1))]


# Notifications.


def test_a_lost_notification_is_repeated_until_decode_has_it() -> None:
    pair = Pair("push")
    pair.loading()
    lost: list[object] = []

    def lose(message: object) -> bool:
        if isinstance(message, Done) and message.sender.engine_id == "P/1" and len(lost) < 2:
            lost.append(message)
            return True
        return False

    pair.lose = lose
    pair.transfer_ended()
    assert not pair.seen(Loaded)
    pair.wait(4)
    assert len(lost) == 2
    assert len(pair.seen(Loaded)) == 1
    assert pair.freed("P") == {1, 2, 3}


@MODES
def test_a_duplicated_notification_is_ignored_and_counted(mode: str) -> None:
    pair = Pair(mode)
    pair.loading()
    pair.transfer_ended()
    before = len(pair.did)
    for message in pair.said(Done):
        for _ in range(3):
            (pair.decode if message.sender.engine_id == "P/1" else pair.prefill).received(message)
    pair.deliver()
    assert len(pair.did) == before
    late = pair.prefill.counters["late_ends"] + pair.decode.counters["late_ends"]
    assert late == 3 * len(pair.said(Done))


def test_prefill_notifies_when_the_data_is_there_and_not_before() -> None:
    pair = Pair("push")
    pair.loading()
    assert isinstance(pair.posted(), PostWrite)
    pair.wait(10)
    assert pair.said(Done) == []
    pair.transfer_ended()
    assert pair.said(Done)


def test_a_notification_for_an_attempt_that_is_over_does_not_complete_the_next() -> None:
    pair = Pair("push")
    pair.loading()
    first = pair.posted().key
    pair.decode.preempted("d")
    pair.decode.allocated("d", (BlockRun(0, (21, 22, 23)),))
    pair.deliver()
    assert pair.posted().key != first
    pair.decode.received(Done(sender=EngineRef("P/1", 1), receiver=EngineRef("D/1", 1), key=first))
    assert not pair.seen(Loaded)
    pair.transfer_ended()
    assert len(pair.seen(Loaded)) == 1


def test_a_registration_that_arrives_after_its_end_is_never_written() -> None:
    pair = Pair("push")
    pair.loading()
    (register,) = pair.said(Register)
    pair.decode.gone("d", "client gone")
    pair.transfer_ended()
    writes = len(pair.seen(PostWrite))
    pair.prefill.received(register)
    pair.deliver()
    assert len(pair.seen(PostWrite)) == writes
    assert pair.prefill.counters["repeated_registrations"] == 1


def test_a_cancelled_registration_that_overtakes_its_cancellation_is_never_written() -> None:
    pair = Pair("push", settings={"hold_s": 60.0})
    reference = pair.prefilled()
    pair.decode.arrived("d", reference, 40)
    pair.deliver()
    pair.lose = lambda message: isinstance(message, Register)
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    (register,) = pair.said(Register)
    assert pair.decode.preempted("d")
    pair.deliver()
    assert pair.freed("D") == {11, 12, 13}  # acknowledged: prefill will not write
    pair.prefill.received(register)
    pair.deliver()
    assert not pair.seen(PostWrite)


# Leases.


@MODES
def test_a_lease_that_expired_under_queueing_never_becomes_a_loaded_request(mode: str) -> None:
    pair = Pair(mode)
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.deliver()
    pair.pass_silently(40)  # decode was stopped, or its renewals did not get through
    pair.prefill.tick()
    pair.collect()
    assert pair.freed("P") == {1, 2, 3}
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    pair.wait(1)
    assert failure(pair) in (FailCode.LEASE_LOST, FailCode.PEER_LOST)
    assert not pair.seen(PostRead)
    assert not pair.seen(PostWrite)
    assert not pair.seen(Loaded)
    assert pair.freed("D") == {11, 12, 13}


def test_what_a_read_brought_after_the_lease_had_run_out_is_not_believed() -> None:
    pair = Pair("pull")
    pair.loading()
    pair.pass_silently(40)
    pair.prefill.tick()
    pair.transfer_ended()
    assert failure(pair) is FailCode.LEASE_LOST
    assert not pair.seen(Loaded)
    assert pair.freed("D") == {11, 12, 13}


def test_what_a_read_brought_is_believed_once_prefill_has_said_that_it_kept_the_blocks() -> None:
    pair = Pair("pull")
    pair.loading()
    key = pair.posted().key
    for _ in range(4):  # renewals arrive, their answers do not
        pair.lose = lambda message: isinstance(message, Renewed)
        pair.pass_silently(8)
        pair.decode._requests["d"].heard_at = pair.clock.now
        pair.decode.tick()
        pair.deliver()
    pair.decode.read_ended(key, True)
    pair.collect()
    assert pair.decode.counters["confirmations"] == 1
    assert not pair.seen(Loaded)
    pair.lose = lambda message: False
    pair.wait(2)
    assert pair.seen(Loaded)


def test_an_idle_prefill_reaps_the_lease_of_a_decode_that_died() -> None:
    pair = Pair("pull")
    pair.prefilled()
    deadline = pair.prefill.next_deadline()
    assert deadline == 30
    pair.pass_silently(30)
    pair.prefill.tick()
    pair.collect()
    assert pair.freed("P") == {1, 2, 3}
    assert pair.prefill.counters["leases_expired"] == 1


def test_a_second_decode_with_the_same_reference_cannot_end_or_take_the_lease_of_the_first() -> None:
    pair = Pair("pull")
    claim = pair.loading().claim(0)
    intruder: dict[str, Any] = {"sender": EngineRef("D/2", 1), "receiver": EngineRef("P/1", 1), "claim": claim}
    key = TransferKey("r", 0, 0)
    pair.prefill.received(Renew(**intruder, key=key, sequence=1))
    pair.prefill.received(Register(**intruder, key=key, num_tokens=40, runs=(), remaining_s=1.0))
    pair.prefill.received(Done(**intruder, key=key))
    pair.collect()
    assert pair.freed("P") == set()
    assert [message.code for message in pair.said(Fail)] == [FailCode.REPLAYED, FailCode.REPLAYED]
    assert pair.prefill.counters["refused_replayed"] == 3
    pair.transfer_ended()
    assert pair.seen(Loaded)
