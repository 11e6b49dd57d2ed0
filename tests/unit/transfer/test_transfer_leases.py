"""Leases on P, renewals on D, and what D may believe of them."""

from __future__ import annotations

import pytest
from transfer_pair import ManualClock

from pdkv.errors import CapacityError, ConfigError, StateError
from pdkv.transfer import BlockRun, LeaseSettings, LeaseTable, Renewer, TransferKey
from pdkv.transfer.messages import LeaseState

pytestmark = pytest.mark.cpu

RUNS = (BlockRun(0, (1, 2)),)
KEY = TransferKey("r", 0, 0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1e6)


@pytest.fixture
def table(clock: ManualClock) -> LeaseTable:
    return LeaseTable(clock)


def test_a_lease_lasts_thirty_seconds(table: LeaseTable, clock: ManualClock) -> None:
    table.grant("r", RUNS, 20)
    clock.now += 29.9
    assert table.state("r") is LeaseState.LIVE
    assert table.expired() == ()
    clock.now += 0.1
    assert table.state("r") is LeaseState.ENDED
    assert [lease.request_id for lease in table.expired()] == ["r"]


def test_a_renewal_leaves_twenty_seconds_and_never_shortens(table: LeaseTable, clock: ManualClock) -> None:
    table.grant("r", RUNS, 20)
    clock.now += 5
    assert table.renew("r") == pytest.approx(25)
    clock.now += 10
    assert table.renew("r") == pytest.approx(20)
    clock.now += 5
    assert table.renew("r") == pytest.approx(20)


def test_a_lease_that_ran_out_cannot_be_renewed_although_nobody_reaped_it(
    table: LeaseTable, clock: ManualClock
) -> None:
    table.grant("r", RUNS, 20)
    clock.now += 30
    assert table.renew("r") == 0.0
    assert table.state("r") is LeaseState.ENDED


def test_the_reaper_finds_an_expired_lease_behind_a_renewed_one_at_the_head(
    table: LeaseTable, clock: ManualClock
) -> None:
    table.grant("head", RUNS, 20)
    table.grant("behind", RUNS, 20)
    clock.now += 29
    table.renew("head")
    clock.now += 1
    assert [lease.request_id for lease in table.expired()] == ["behind"]


def test_an_idle_engine_knows_when_to_wake_up_for_its_leases(table: LeaseTable, clock: ManualClock) -> None:
    assert table.next_deadline() is None
    table.grant("a", RUNS, 20)
    clock.now += 3
    table.grant("b", RUNS, 20)
    assert table.next_deadline() == 1e6 + 30
    table.end("a")
    assert table.next_deadline() == 1e6 + 33


def test_a_revoked_lease_runs_out_whatever_decode_says(table: LeaseTable, clock: ManualClock) -> None:
    table.grant("r", RUNS, 20)
    table.revoke("r")
    clock.now += 20
    assert table.renew("r") == pytest.approx(10)


def test_the_lease_ends_with_the_last_rank_of_decode_however_often_one_says_so(table: LeaseTable) -> None:
    table.grant("r", RUNS, 20, ranks=2)
    assert not table.rank_ended("r", 0)
    assert not table.rank_ended("r", 0)
    assert table.rank_ended("r", 1)


def test_one_request_id_has_one_lease_ever(table: LeaseTable) -> None:
    table.grant("r", RUNS, 20)
    with pytest.raises(StateError):
        table.grant("r", RUNS, 20)
    assert table.end("r") is not None
    assert table.end("r") is None
    with pytest.raises(StateError):
        table.grant("r", RUNS, 20)


def test_the_tables_are_bounded(clock: ManualClock) -> None:
    table = LeaseTable(clock, LeaseSettings(max_leases=2, max_ended=2))
    table.grant("a", RUNS, 20)
    table.grant("b", RUNS, 20)
    with pytest.raises(CapacityError):
        table.grant("c", RUNS, 20)
    for request_id in ("x", "y", "z"):
        table.note_ended(request_id)
    assert table.state("x") is LeaseState.UNKNOWN
    assert table.state("z") is LeaseState.ENDED


def test_settings_that_cannot_survive_one_lost_renewal_are_refused() -> None:
    with pytest.raises(ConfigError):
        LeaseSettings(renew_every_s=11)


def test_decode_renews_every_second_until_the_first_answer_and_every_five_after(clock: ManualClock) -> None:
    renewer = Renewer(clock)
    renewer.start(KEY)
    assert [key for key, _ in renewer.take_due()] == [KEY]
    assert renewer.take_due() == ()
    clock.now += 1
    ((_, sequence),) = renewer.take_due()
    assert renewer.answered(KEY, sequence, 30.0) == clock.now
    clock.now += 4.9
    assert renewer.take_due() == ()
    clock.now += 0.1
    assert len(renewer.take_due()) == 1


def test_what_decode_believes_ends_before_what_prefill_holds(clock: ManualClock) -> None:
    prefill_clock = ManualClock(-4e5)
    table, renewer = LeaseTable(prefill_clock), Renewer(clock)
    table.grant("r", RUNS, 20)
    renewer.start(KEY)
    ((_, sequence),) = renewer.take_due()
    prefill_clock.now += 7  # on its way
    clock.now += 7
    remaining_s = table.renew("r")
    prefill_clock.now += 2  # and back
    clock.now += 2
    renewer.answered(KEY, sequence, remaining_s)
    until = renewer.guaranteed_until(KEY)
    assert until is not None
    believed_s, lease = until - clock.now, table.get("r")
    assert lease is not None
    assert 0 < believed_s < lease.expires_at - prefill_clock.now


def test_an_answer_that_comes_twice_or_to_no_question_is_ignored(clock: ManualClock) -> None:
    renewer = Renewer(clock)
    renewer.start(KEY)
    ((_, sequence),) = renewer.take_due()
    assert renewer.answered(KEY, sequence + 1, 30.0) is None
    assert renewer.answered(KEY, sequence, 30.0) is not None
    assert renewer.answered(KEY, sequence, 3000.0) is None
    assert renewer.guaranteed_until(KEY) == clock.now + 29.5
