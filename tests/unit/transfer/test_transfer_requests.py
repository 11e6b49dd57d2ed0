"""The ways in which a request ends when everybody lives: both sides get their blocks back within one round trip."""

from __future__ import annotations

import pytest
from transfer_pair import Failed, Loaded, Pair, RebuildAgent, Recompute

from pdkv.errors import StateError
from pdkv.transfer import BlockRun, EngineRef, FailCode, TransferKey
from pdkv.transfer.actions import PostRead, PostWrite
from pdkv.transfer.messages import Abort, Cancel, Done, Register, Renew

pytestmark = pytest.mark.cpu

MODES = pytest.mark.parametrize("mode", ["pull", "push"])


@MODES
def test_a_request_that_loads_ends_its_lease_within_one_round_trip(mode: str) -> None:
    pair = Pair(mode)
    pair.loading()
    assert isinstance(pair.posted(), PostRead if mode == "pull" else PostWrite)
    assert [(p.source, p.destination) for p in pair.posted().pairs] == [(1, 11), (2, 12), (3, 13)]
    assert pair.freed("P") == set()
    pair.transfer_ended()
    assert pair.seen(Loaded)
    assert pair.freed("P") == {1, 2, 3}
    assert pair.freed("D") == set()  # the engine's now
    assert pair.prefill.holders() == pair.decode.holders() == ()


@MODES
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17])
def test_prompts_around_one_block_end_their_lease_at_once(mode: str, num_tokens: int) -> None:
    pair = Pair(mode)
    blocks = tuple(range(1, 2 + (num_tokens > 16)))
    reference = pair.prefilled(blocks=blocks, num_tokens=num_tokens)
    pair.decode.arrived("d", reference, num_tokens)
    pair.deliver()
    pair.decode.allocated("d", (BlockRun(0, tuple(block + 10 for block in blocks)),))
    pair.deliver()
    pair.transfer_ended()
    assert pair.freed("P") == set(blocks)
    assert pair.clock.now == 0


@MODES
@pytest.mark.parametrize("cached", [0, 1, 2, 3])
def test_a_prefix_cached_on_decode_from_none_to_all_blocks_ends_the_lease_at_once(mode: str, cached: int) -> None:
    pair = Pair(mode)
    reference = pair.prefilled()
    pair.decode.arrived("d", reference, 40)
    pair.deliver()
    wanted = tuple(range(11 + cached, 14))
    pair.decode.allocated("d", (BlockRun(cached, wanted),) if wanted else ())
    pair.deliver()
    if wanted:
        assert [(p.source, p.destination) for p in pair.posted().pairs] == [(b - 10, b) for b in wanted]
        pair.transfer_ended()
    assert pair.seen(Loaded)
    assert pair.freed("P") == {1, 2, 3}
    assert pair.clock.now == 0


def test_decode_may_register_before_prefill_has_finished() -> None:
    pair = Pair("push")
    early = pair.prefill.expect("r", 40)
    pair.decode.arrived("d", early, 40)
    pair.deliver()
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    pair.wait(20)
    assert not pair.seen(PostWrite)
    pair.prefilled(blocks=(4, 5, 6))
    pair.deliver()
    pair.transfer_ended()
    assert pair.seen(Loaded)
    assert {4, 5, 6} <= pair.freed("P")


@MODES
def test_the_lease_is_renewed_while_the_request_waits_in_decodes_queue(mode: str) -> None:
    pair = Pair(mode)
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.wait(300)
    assert pair.freed("P") == set()
    assert 59 <= len(pair.said(Renew)) <= 61
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    pair.transfer_ended()
    assert pair.seen(Loaded)


@MODES
def test_a_client_that_goes_before_admission_frees_prefill_at_once(mode: str) -> None:
    pair = Pair(mode)
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.decode.gone("d", "client gone")
    pair.deliver()
    assert pair.freed("P") == {1, 2, 3}
    assert pair.clock.now == 0
    assert pair.decode.next_deadline() is None
    assert pair.prefill.next_deadline() is None


def test_a_client_that_goes_before_prefill_has_finished_frees_its_blocks_when_it_has() -> None:
    pair = Pair("push")
    early = pair.prefill.expect("r", 40)
    pair.decode.arrived("d", early, 40)
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    pair.decode.gone("d", "client gone")
    pair.deliver()
    assert pair.freed("D") == {11, 12, 13}
    pair.prefilled(blocks=(4, 5, 6))
    pair.deliver()
    assert pair.freed("P") == {4, 5, 6}
    assert not pair.seen(PostWrite)


@MODES
def test_I11_a_client_that_goes_during_the_transfer_frees_blocks_when_it_has_ended(mode: str) -> None:
    pair = Pair(mode)
    pair.loading()
    pair.decode.gone("d", "client gone")
    pair.deliver()
    assert pair.freed("D") == set()
    assert pair.decode.quarantine.num_blocks == 3
    if mode == "push":
        assert pair.freed("P") == set()  # the WRITE still reads them
    pair.transfer_ended()
    assert pair.freed("D") == {11, 12, 13}
    assert pair.freed("P") == {1, 2, 3}
    assert not pair.seen(Loaded)
    assert not pair.seen(Failed)  # nobody is there to be told


@MODES
def test_a_request_that_decode_refuses_is_over_on_both_sides_and_says_why(mode: str) -> None:
    pair = Pair(mode)
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.decode.gone("d", "too long for this engine")
    pair.deliver()
    assert pair.said(Abort)[0].reason == "too long for this engine"
    assert pair.freed("P") == {1, 2, 3}


@MODES
def test_a_preempted_request_is_read_again_while_the_lease_is_held(mode: str) -> None:
    pair = Pair(mode, settings={"hold_s": 60.0})
    pair.loading()
    pair.transfer_ended()
    assert pair.freed("P") == set()
    pair.wait(25)
    assert pair.decode.preempted("d")
    pair.decode.allocated("d", (BlockRun(0, (21, 22, 23)),))
    pair.deliver()
    assert pair.posted().key.transfer_id == 1
    pair.transfer_ended()
    assert len(pair.seen(Loaded)) == 2
    assert pair.decode.counters["read_again"] == 1
    pair.decode.finished("d")
    pair.deliver()
    assert pair.freed("P") == {1, 2, 3}


@MODES
def test_a_preempted_request_whose_lease_has_ended_is_computed_again_and_counted(mode: str) -> None:
    pair = Pair(mode)
    pair.loading()
    pair.transfer_ended()
    assert not pair.decode.preempted("d")
    assert pair.decode.counters["preempted_without_lease"] == 1


@MODES
def test_I11_a_request_preempted_while_it_loads_leaves_its_blocks_until_the_transfer_has_ended(mode: str) -> None:
    pair = Pair(mode)
    pair.loading()
    first = pair.posted().key
    assert pair.decode.preempted("d")
    pair.deliver()
    assert pair.freed("D") == set()
    assert bool(pair.said(Cancel)) == (mode == "push")
    pair.transfer_ended()
    assert pair.freed("D") == {11, 12, 13}
    pair.decode.allocated("d", (BlockRun(0, (21, 22, 23)),))
    pair.deliver()
    assert pair.posted().key != first
    pair.transfer_ended()
    assert len(pair.seen(Loaded)) == 1
    assert pair.freed("P") == {1, 2, 3}


@MODES
def test_a_lease_that_is_held_for_rereads_ends_when_its_time_has_come(mode: str) -> None:
    pair = Pair(mode, settings={"hold_s": 10.0})
    pair.loading()
    pair.transfer_ended()
    pair.wait(9)
    assert pair.freed("P") == set()
    pair.wait(2)
    assert pair.freed("P") == {1, 2, 3}
    assert pair.seen(Failed) == pair.seen(Recompute) == pair.seen(RebuildAgent) == []


@MODES
def test_two_clocks_a_million_seconds_apart_make_no_difference(mode: str) -> None:
    pair = Pair(mode, offset_s=1e6)
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.wait(100)
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    pair.transfer_ended()
    assert pair.seen(Loaded)
    assert pair.freed("P") == {1, 2, 3}


def test_prefill_ranks_wait_for_every_rank_of_decode() -> None:
    pair = Pair("pull")
    reference = pair.prefill.prefilled("r", (BlockRun(0, (1, 2, 3)),), 40, ranks=2)
    pair.decode.arrived("d", reference, 40)
    pair.decode.allocated("d", ())
    pair.deliver()
    assert pair.freed("P") == set()
    done = pair.said(Done)[0]
    sender, key = EngineRef("D/1/rank1", 1), TransferKey("r", 0, 1)
    other = Done(sender=sender, receiver=done.receiver, key=key, claim=done.claim)
    pair.prefill.received(other)
    pair.deliver()
    assert pair.freed("P") == {1, 2, 3}


def test_a_request_without_blocks_on_prefill_takes_no_lease() -> None:
    pair = Pair("pull")
    reference = pair.prefill.prefilled("r", (), 0)
    assert reference.blocks == ()
    assert pair.prefill.holders() == ()


def test_a_request_id_is_used_once_at_a_time_on_decode() -> None:
    pair = Pair()
    reference = pair.prefilled()
    pair.decode.arrived("d", reference, 40)
    with pytest.raises(StateError, match="already"):
        pair.decode.arrived("d", reference, 40)


@MODES
def test_blocks_allocated_for_a_request_that_is_over_come_straight_back(mode: str) -> None:
    pair = Pair(mode)
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.decode.gone("d", "client gone")
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    assert pair.freed("D") == {11, 12, 13}
    assert not pair.said(Register)


def test_a_failed_load_recomputes_where_the_policy_says_so_and_is_counted() -> None:
    pair = Pair("pull", settings={"on_failure": "recompute"})
    pair.loading()
    pair.transfer_ended(ok=False)
    (action,) = pair.seen(Recompute)
    assert action.code is FailCode.TRANSFER_FAILED
    assert pair.decode.counters["recomputed"] == 1
    assert pair.freed("D") == {11, 12, 13}
    assert pair.freed("P") == {1, 2, 3}
