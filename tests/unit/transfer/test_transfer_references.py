"""References are sealed by P, expire on P's clock, and are used once; what is refused hurts one request only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from transfer_pair import Failed, Loaded, ManualClock, Pair, failure, nothing_is_left

from pdkv.errors import StateError
from pdkv.transfer import BlockRun, Counters, EngineRef, FailCode, ProducerSettings, Reference, TransferKey
from pdkv.transfer.actions import PostRead, PostWrite
from pdkv.transfer.issued import IssuedReferences, ReferenceSettings
from pdkv.transfer.messages import Claim, Done, Fail, Renew

pytestmark = pytest.mark.cpu

MODES = pytest.mark.parametrize("mode", ["pull", "push"])
ALTERATIONS: dict[str, Any] = {
    "blocks": (BlockRun(0, (2, 1, 3)),),
    "serial": 99,
    "valid_s": 80_000.0,
    "mac": b"\1" * 32,
}


@pytest.mark.parametrize("field", ALTERATIONS)
@MODES
def test_an_altered_reference_is_refused_by_prefill_before_anything_is_posted(mode: str, field: str) -> None:
    pair = Pair(mode)
    genuine = pair.prefilled("s", (4, 5, 6))
    reference = msgspec.structs.replace(pair.prefilled(), **{field: ALTERATIONS[field]})
    pair.decode.arrived("d", reference, 40)
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.decode.arrived("e", genuine, 40)
    pair.decode.allocated("e", (BlockRun(0, (21, 22, 23)),))
    pair.deliver()
    assert failure(pair) is FailCode.FORGED
    assert pair.prefill.counters["refused_forged"] > 0
    pair.transfer_ended()
    assert len(pair.seen(PostRead) + pair.seen(PostWrite)) == 1
    assert [loaded.request_id for loaded in pair.seen(Loaded)] == ["e"]
    assert pair.freed("P") == {4, 5, 6}, "a forged reference has no right to end the lease either"
    pair.wait(100)
    assert nothing_is_left(pair)


@MODES
def test_the_mac_of_one_request_does_not_open_another(mode: str) -> None:
    pair = Pair(mode)
    mine, other = pair.prefilled(), pair.prefilled("s", (4, 5, 6))
    pair.decode.arrived("d", msgspec.structs.replace(mine, request_id="s", blocks=other.blocks), 40)
    pair.deliver()
    assert failure(pair) is FailCode.FORGED


def test_a_genuine_claim_to_one_request_sent_in_the_name_of_another_is_refused() -> None:
    pair = Pair("pull")
    mine, _ = pair.prefilled(), pair.prefilled("s", (4, 5, 6))
    ends: dict[str, Any] = {"sender": EngineRef("D/1", 1), "receiver": EngineRef("P/1", 1)}
    pair.prefill.received(Done(**ends, key=TransferKey("s", 0, 0), claim=mine.claim(0)))
    pair.collect()
    assert pair.freed("P") == set()
    assert pair.prefill.counters["refused_forged"] == 1


@pytest.mark.parametrize("kind", [Renew, Done])
def test_without_a_claim_nothing_is_given_and_nothing_ended(kind: Any) -> None:
    pair = Pair("pull")
    pair.prefilled()
    extra = {"sequence": 1} if kind is Renew else {}
    pair.prefill.received(
        kind(sender=EngineRef("D/9", 1), receiver=EngineRef("P/1", 1), key=TransferKey("r", 0, 0), **extra)
    )
    pair.collect()
    assert pair.freed("P") == set()
    assert pair.prefill.counters["refused_forged"] == 1


def test_a_restarted_prefill_does_not_know_its_predecessors_references() -> None:
    clock, counters = ManualClock(), Counters()
    old, new = IssuedReferences(clock, counters), IssuedReferences(clock, counters)
    reference = old.issue(EngineRef("P/1", 1), "r", 40)
    new.issue(EngineRef("P/1", 1), "r", 40)
    assert code(new, reference) is FailCode.FORGED
    assert code(old, reference) is None


def test_a_reference_that_nobody_used_in_time_is_refused_and_one_in_use_goes_on() -> None:
    clock = ManualClock(1e6)
    issued = IssuedReferences(clock, Counters(), ReferenceSettings(valid_s=60))
    used, unused = (issued.issue(EngineRef("P/1", 1), name, 40) for name in ("used", "unused"))
    assert used.valid_s == 60
    clock.now += 59.9
    assert code(issued, used) is None
    clock.now += 0.2
    assert code(issued, used) is None
    assert code(issued, unused) is FailCode.EXPIRED


@MODES
def test_an_expired_reference_fails_its_request_only(mode: str) -> None:
    pair = Pair(mode, prefill_settings=ProducerSettings(reference=ReferenceSettings(valid_s=5)), offset_s=-1e5)
    reference = pair.prefilled()
    pair.wait(6)
    pair.decode.arrived("d", reference, 40)
    pair.decode.arrived("e", pair.prefilled("s", (4, 5, 6)), 40)
    pair.decode.allocated("e", (BlockRun(0, (21, 22, 23)),))
    pair.deliver()
    assert failure(pair) is FailCode.EXPIRED
    pair.transfer_ended()
    assert [loaded.request_id for loaded in pair.seen(Loaded)] == ["e"]


def test_a_second_use_by_the_same_decode_is_refused_by_prefill_too() -> None:
    pair = Pair("pull")
    reference = pair.loading()
    pair.decode._used.clear()  # it used more references since than it remembers
    pair.decode.arrived("again", reference, 40)
    pair.deliver()
    assert [(action.request_id, action.code) for action in pair.seen(Failed)] == [("again", FailCode.REPLAYED)]
    assert pair.prefill.counters["refused_replayed"] > 0
    pair.transfer_ended()
    assert [loaded.request_id for loaded in pair.seen(Loaded)] == ["d"]


def test_each_rank_of_decode_takes_its_part_once_and_no_more_ranks_than_were_announced() -> None:
    issued = IssuedReferences(ManualClock(), Counters())
    reference = issued.issue(EngineRef("P/1", 1), "r", 40, ranks=2)
    assert [code(issued, reference, rank=rank) for rank in (3, 5, 3, 7)] == [None, None, None, FailCode.REPLAYED]
    assert code(issued, reference, rank=3, engine="D/2") is FailCode.REPLAYED
    assert code(issued, reference, rank=3, use=1) is FailCode.REPLAYED


def test_the_early_and_the_final_reference_to_a_request_are_one_use() -> None:
    pair = Pair("push")
    early = pair.prefill.expect("r", 40)
    with pytest.raises(StateError, match="issued already"):
        pair.prefill.expect("r", 40)
    pair.decode.arrived("d", early, 40)
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    pair.deliver()
    final = pair.prefilled()
    assert code(pair.prefill._references, final, engine="D/2") is FailCode.REPLAYED
    pair.deliver()
    pair.transfer_ended()
    assert pair.seen(Loaded)
    assert not pair.said(Fail)


def test_the_books_stay_small_and_forget_no_reference_in_use_while_there_are_others() -> None:
    clock, counters = ManualClock(), Counters()
    issued = IssuedReferences(clock, counters, ReferenceSettings(valid_s=10, max_issued=100))
    used = issued.issue(EngineRef("P/1", 1), "used", 40)
    assert code(issued, used) is None
    for number in range(1000):
        clock.now += 1
        issued.issue(EngineRef("P/1", 1), f"r{number}", 40)
    assert len(issued) <= 20
    assert code(issued, used) is None
    assert counters["references_forgotten"] == 0
    for number in range(1000):
        issued.issue(EngineRef("P/1", 1), f"s{number}", 40)
    assert len(issued) == 100
    assert counters["references_forgotten"] > 0
    assert code(issued, used) is None


def test_a_reference_made_by_another_process_of_prefill_opens_only_what_it_was_made_for() -> None:
    scheduler = IssuedReferences(ManualClock(), Counters())
    ours, foreign = (scheduler.issue(EngineRef("P/1", 1), name, 40, (BlockRun(0, (1, 2, 3)),)) for name in ("r", "f"))
    pair = Pair("pull")
    assert pair.prefill.prefilled("r", ours.blocks, 40, reference=ours) is ours
    altered = msgspec.structs.replace(ours, num_tokens=41)
    assert code(pair.prefill._references, altered) is FailCode.FORGED
    assert code(pair.prefill._references, foreign) is FailCode.FORGED
    assert code(pair.prefill._references, ours) is None


def code(
    issued: IssuedReferences, reference: Reference, *, rank: int = 0, engine: str = "D/1", use: int = 0
) -> FailCode | None:
    claim: Claim = reference.claim(use)
    message = Done(
        sender=EngineRef(engine, 1),
        receiver=reference.engine,
        key=TransferKey(reference.request_id, 0, rank),
        claim=claim,
    )
    refusal = issued.check(message)
    return None if refusal is None else refusal[0]
