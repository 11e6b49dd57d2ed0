"""Quarantine, outbox, admission, counters, and what is remembered of transfers that are over."""

from __future__ import annotations

import logging

import pytest
from transfer_pair import ManualClock

from pdkv.errors import CapacityError
from pdkv.transfer import Admission, Counters, EngineRef, Quarantine, QuarantineSettings, TransferKey
from pdkv.transfer.actions import FreeBlocks, Send
from pdkv.transfer.messages import Done
from pdkv.transfer.outbox import Outbox, OutboxSettings
from pdkv.transfer.peers import UsedTransfers

pytestmark = pytest.mark.cpu

A, B = TransferKey("a", 1, 0), TransferKey("b", 2, 0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_I11_blocks_are_held_until_every_transfer_that_may_touch_them_has_ended(clock: ManualClock) -> None:
    quarantine = Quarantine(clock, Counters())
    quarantine.hold("r", (1, 2), [A, B])
    assert quarantine.ended(A) == ()
    assert quarantine.ended(A) == ()
    assert quarantine.num_blocks == 2
    assert quarantine.ended(B) == (FreeBlocks("r", (1, 2)),)
    assert quarantine.num_blocks == 0


def test_I11_the_agent_is_asked_to_be_rebuilt_once_and_only_then_are_the_blocks_free(clock: ManualClock) -> None:
    quarantine = Quarantine(clock, Counters(), QuarantineSettings(rebuild_after_s=30))
    quarantine.hold("r", (1,), [A])
    assert quarantine.next_deadline() == 30
    clock.now = 29
    assert quarantine.wants_rebuild() is None
    clock.now = 30
    assert quarantine.oldest_age_s == 30
    assert "30 s" in (quarantine.wants_rebuild() or "")
    assert quarantine.wants_rebuild() is None
    assert quarantine.next_deadline() is None
    assert quarantine.num_blocks == 1
    assert quarantine.agent_rebuilt() == (FreeBlocks("r", (1,)),)
    quarantine.hold("r", (2,), [A])
    clock.now = 60
    assert quarantine.wants_rebuild() is not None


def test_more_blocks_in_quarantine_than_the_cap_do_not_wait_for_their_age(clock: ManualClock) -> None:
    quarantine = Quarantine(clock, Counters(), QuarantineSettings(max_blocks=3))
    quarantine.hold("r", (1, 2, 3), [A])
    assert quarantine.wants_rebuild() is None
    quarantine.hold("s", (4,), [B])
    assert quarantine.next_deadline() == clock.now
    assert "more than 3" in (quarantine.wants_rebuild() or "")


def done(key: TransferKey) -> tuple[Send, Done]:
    message = Done(sender=EngineRef("D", 1), receiver=EngineRef("P", 1), key=key)
    return Send("P", message), message


def test_a_message_is_repeated_at_growing_intervals_and_given_up_in_the_end(clock: ManualClock) -> None:
    counters = Counters()
    outbox = Outbox(clock, counters)
    outbox.put(*done(A))
    times, given_up = [], ()
    while not given_up and clock.now < 1000:
        clock.now = outbox.next_deadline() or 1000
        again, given_up = outbox.take_due()
        times += [clock.now] * len(again)
    assert times == [1, 3, 7, 15, 23, 31, 39, 47, 55]
    assert given_up == (A,)
    assert clock.now == 60
    assert (len(outbox), counters["unacknowledged"]) == (0, 1)


def test_an_acknowledged_message_is_not_repeated_and_a_second_acknowledgement_is_seen_as_late(
    clock: ManualClock,
) -> None:
    outbox = Outbox(clock, Counters())
    outbox.put(*done(A))
    outbox.put(*done(A))
    assert len(outbox) == 1
    assert outbox.acknowledged(A, "DONE")
    assert not outbox.acknowledged(A, "DONE")
    assert not outbox.pending(A)
    clock.now = 100
    assert outbox.take_due() == ((), ())


def test_the_outbox_is_bounded(clock: ManualClock) -> None:
    counters = Counters()
    outbox = Outbox(clock, counters, OutboxSettings(max_entries=1))
    outbox.put(*done(A))
    outbox.put(*done(B))
    assert (outbox.pending(A), outbox.pending(B), counters["outbox_overflows"]) == (False, True, 1)


def test_a_transfer_that_is_over_stays_over(clock: ManualClock) -> None:
    used = UsedTransfers()
    used.mark("D", 5)
    assert used.is_over("D", 5)
    assert not used.is_over("D", 6)
    assert not used.is_over("other", 5)
    used.raise_floor("D", 9)
    used.raise_floor("D", 3)
    assert used.is_over("D", 8)
    assert not used.is_over("D", 9)


def test_ids_of_a_peer_that_never_says_which_are_alive_do_not_fill_the_table() -> None:
    used = UsedTransfers(max_ids=100, max_engines=3)
    for transfer_id in range(10_000):
        used.mark("D", transfer_id)
    assert len(used._used["D"].over) <= 100
    assert used.is_over("D", 0)
    for engine in range(50):
        used.mark(f"engine-{engine}", 1)
    assert len(used._used) == 3


def test_200_requests_at_a_capacity_of_4_get_a_place_or_a_time_to_come_back(clock: ManualClock) -> None:
    counters = Counters()
    admission = Admission(clock, counters, capacity=4)
    waiting: list[str] = []
    admitted = 0
    for number in range(200):
        clock.now += 0.5
        if number % 4 == 3 and waiting:
            admission.leave(waiting.pop(0))
        if admission.try_enter(f"r{number}"):
            waiting.append(f"r{number}")
            admitted += 1
        room = admission.room()
        assert room.waiting <= 4
        assert room.free == 4 - room.waiting
        assert (room.retry_after_s > 0) == (room.free == 0)
    assert counters["refused_admissions"] == 200 - admitted
    assert admission.room().retry_after_s == 2  # one leaves every 2 s


def test_leaving_twice_or_entering_twice_changes_nothing(clock: ManualClock) -> None:
    admission = Admission(clock, Counters(), capacity=1)
    assert admission.try_enter("a")
    assert admission.try_enter("a")
    assert not admission.try_enter("b")
    admission.leave("a")
    admission.leave("a")
    assert admission.room().free == 1
    with pytest.raises(CapacityError):
        Admission(clock, Counters(), capacity=0)


def test_blocks_of_waiting_prompts_are_bounded_too_and_the_limit_is_named(clock: ManualClock) -> None:
    admission = Admission(clock, Counters(), capacity=3, capacity_blocks=10)
    assert admission.try_enter("small", 4)
    assert admission.limit_hit(7) == "blocks"
    assert not admission.try_enter("large", 7)
    assert admission.try_enter("fits", 6)
    room = admission.room()
    assert (room.free, room.free_blocks, room.retry_after_s > 0) == (1, 0, True)
    assert admission.try_enter("no blocks of its own", 0)
    assert admission.limit_hit() == "requests"


def test_a_prompt_larger_than_the_limit_is_let_in_where_nothing_waits(clock: ManualClock) -> None:
    admission = Admission(clock, Counters(), capacity=3, capacity_blocks=10)
    assert admission.try_enter("larger than all", 11)
    assert not admission.try_enter("the next", 1)
    admission.leave("larger than all")
    assert admission.try_enter("the next", 1)


def test_requests_that_came_another_way_take_room_as_well(clock: ManualClock) -> None:
    admission = Admission(clock, Counters(), capacity=2, capacity_blocks=10)
    admission.set_elsewhere(1, 8)
    assert admission.limit_hit(3) == "blocks"
    assert admission.try_enter("a", 2)
    assert admission.limit_hit() == "requests"
    admission.set_elsewhere(0, 0)
    assert admission.room().waiting == 1


def test_an_observer_that_raises_on_every_call_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def observer(name: str, amount: int) -> None:
        raise RuntimeError("no telemetry today")

    counters = Counters(observer)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            counters.count("leases")
    assert counters.as_dict() == {"leases": 5, "observer_errors": 5}
    assert len(caplog.records) == 1
