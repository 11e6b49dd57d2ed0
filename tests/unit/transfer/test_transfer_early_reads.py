"""READs that are posted beside the question for the lease: what they brought counts once prefill has said yes."""

from __future__ import annotations

import msgspec
import pytest
from transfer_pair import FreeBlocks, Loaded, Pair, descriptor, failure, nothing_is_left

from pdkv.transfer import BlockRun, EngineRef, FailCode, Reference
from pdkv.transfer.actions import AbandonRead, PostRead, Recompute
from pdkv.transfer.issued import ReferenceSettings
from pdkv.transfer.messages import Renew, Renewed
from pdkv.transfer.producer_books import ProducerSettings

pytestmark = pytest.mark.cpu

MINE = (11, 12, 13)


def acquainted(**settings: object) -> Pair:
    """P and D that have met, over a transport that fences READs."""
    pair = Pair("pull", settings=settings)
    meet(pair)
    return pair


def meet(pair: Pair) -> None:
    reference = pair.prefilled("first", (4,), 16)
    pair.decode.arrived("first", reference, 16)
    pair.deliver()
    pair.decode.reads_fenced(reference.engine)
    pair.decode.gone("first", "only to meet")
    pair.deliver()
    pair.did.clear()
    pair.sent.clear()


def ask(pair: Pair, reference: Reference | None = None) -> Reference:
    """A request "d" that has blocks at once; what D has to say waits in `on_the_way`."""
    reference = reference or pair.prefilled()
    pair.decode.arrived("d", reference, 40)
    pair.decode.allocated("d", (BlockRun(0, MINE),))
    pair.collect()
    return reference


def read_ended(pair: Pair, ok: bool = True) -> None:
    """The transport says so, and nobody hears from anybody yet."""
    pair.decode.read_ended(pair.posted().key, ok)
    pair.collect()


def abandoned(pair: Pair) -> None:
    """Do what an AbandonRead wants of the host."""
    (action,) = pair.seen(AbandonRead)
    pair.decode.read_ended(action.key, False)
    pair.collect()


def test_a_read_is_posted_beside_the_question_for_the_lease() -> None:
    pair = acquainted()
    ask(pair)
    assert [type(message) for message in pair.sent] == [Renew]
    assert [(p.source, p.destination) for p in pair.posted().pairs] == [(1, 11), (2, 12), (3, 13)]
    assert pair.decode.counters["early_reads"] == 1


def test_what_it_brought_counts_once_prefill_has_said_that_it_holds_the_blocks() -> None:
    pair = acquainted()
    ask(pair)
    read_ended(pair)
    assert not pair.seen(Loaded)
    assert len(pair.sent) == 1  # the question is on its way already
    pair.deliver()
    assert pair.seen(Loaded) == [Loaded("d")]
    assert pair.freed("P") == {1, 2, 3}
    assert pair.clock.now == 0
    assert pair.decode.counters["early_reads_dropped"] == pair.decode.counters["confirmations"] == 0
    assert nothing_is_left(pair)


def test_an_answer_that_comes_before_its_end_is_enough() -> None:
    pair = acquainted()
    ask(pair)
    pair.deliver()
    assert not pair.seen(Loaded)
    read_ended(pair)
    assert pair.seen(Loaded) == [Loaded("d")]


def test_an_answer_that_is_lost_is_asked_for_again() -> None:
    pair = acquainted()
    ask(pair)
    read_ended(pair)
    pair.lose = lambda message: isinstance(message, Renewed)
    pair.deliver()
    pair.wait(0.75)
    assert not pair.seen(Loaded)
    pair.lose = lambda message: False
    pair.wait(1.0)
    assert pair.seen(Loaded) == [Loaded("d")]


def test_what_it_brought_is_thrown_away_where_the_lease_has_ended() -> None:
    pair = acquainted()
    reference = pair.prefilled()
    pair.pass_silently(40)  # the reference was long on its way
    pair.prefill.tick()
    pair.collect()
    assert pair.freed("P") == {1, 2, 3}
    ask(pair, reference)
    read_ended(pair)
    assert pair.freed("D") == set()
    pair.deliver()
    assert failure(pair) is FailCode.LEASE_LOST
    assert not pair.seen(Loaded)
    assert pair.freed("D") == set(MINE)
    assert pair.decode.counters["early_reads_dropped"] == 1


def test_I11_blocks_of_one_that_was_refused_are_free_when_it_has_ended_and_not_before() -> None:
    pair = acquainted()
    reference = pair.prefilled()
    forged = (BlockRun(0, (5, 6, 7)),)
    ask(pair, msgspec.structs.replace(reference, blocks=forged))
    pair.deliver()
    assert failure(pair) is FailCode.FORGED
    assert pair.freed("D") == set()
    assert pair.decode.quarantine.num_blocks == 3
    abandoned(pair)
    assert pair.freed("D") == set(MINE)
    assert pair.decode.quarantine.num_blocks == 0


def test_one_that_cannot_be_abandoned_keeps_its_blocks_until_the_agent_is_rebuilt() -> None:
    pair = acquainted()
    ask(pair)
    pair.decode.gone("d", "client gone")
    pair.deliver()
    assert pair.seen(AbandonRead)
    assert pair.decode.counters["early_reads_dropped"] == 1
    pair.wait(29)
    assert pair.freed("D") == set()
    pair.decode.agent_rebuilt(2, descriptor())
    pair.collect()
    assert pair.freed("D") == set(MINE)


def test_a_read_that_failed_fails_the_request_once_prefill_has_said_that_it_held_the_blocks() -> None:
    pair = acquainted()
    ask(pair)
    read_ended(pair, ok=False)
    assert not pair.did[1:]
    pair.deliver()
    assert failure(pair) is FailCode.TRANSFER_FAILED
    assert pair.freed("D") == set(MINE)
    assert pair.freed("P") == {1, 2, 3}
    assert nothing_is_left(pair)


def test_a_read_that_failed_when_the_lease_was_known_to_live_fails_it_at_once() -> None:
    pair = acquainted()
    ask(pair)
    pair.deliver()
    read_ended(pair, ok=False)
    assert failure(pair) is FailCode.TRANSFER_FAILED


@pytest.mark.parametrize("ok", [True, False], ids=["read all the same", "found nothing to read"])
def test_from_a_prefill_that_sleeps_it_fails_by_prefills_word(ok: bool) -> None:
    pair = acquainted()
    reference = pair.prefilled()
    pair.prefill.prefill_aborted("r", "wants to sleep")
    pair.prefill.sleep()
    pair.prefill.take_actions()  # its word of it is lost
    ask(pair, reference)
    read_ended(pair, ok)
    assert not pair.seen(Loaded)
    pair.deliver()
    assert failure(pair) is FailCode.ASLEEP
    assert pair.freed("D") == set(MINE)


def test_from_a_prefill_that_has_woken_again_it_fails_by_prefills_word() -> None:
    pair = acquainted()
    reference = pair.prefilled()
    pair.prefill.prefill_aborted("r", "wants to sleep")
    pair.prefill.sleep()
    pair.prefill.wake(2, descriptor())
    pair.prefill.take_actions()
    ask(pair, reference)
    read_ended(pair)
    pair.deliver()
    assert failure(pair) is FailCode.STALE_GENERATION
    assert not pair.seen(Loaded)


def test_I10_nothing_is_read_early_from_a_generation_that_decode_knows_to_be_gone() -> None:
    pair = acquainted()
    reference = pair.prefilled()
    pair.prefill.prefill_aborted("r", "wants to sleep")
    pair.prefill.sleep()
    pair.deliver()
    ask(pair, reference)
    assert not pair.seen(PostRead)


def test_a_request_that_prefill_aborts_meanwhile_fails_and_is_acknowledged_when_the_read_has_ended() -> None:
    pair = acquainted()
    ask(pair)
    pair.deliver()
    pair.prefill.prefill_aborted("r", "wants its blocks back")
    pair.deliver()
    assert failure(pair) is FailCode.PREFILL_ABORTED
    assert pair.freed("P") == set()
    abandoned(pair)
    pair.deliver()
    assert pair.freed("D") == set(MINE)
    assert pair.freed("P") == {1, 2, 3}


def test_a_request_that_prefill_had_aborted_before_it_was_asked_is_not_believed() -> None:
    pair = acquainted()
    reference = ask(pair)
    read_ended(pair)
    pair.prefill.prefill_aborted(reference.request_id, "wants its blocks back")
    pair.deliver()
    assert pair.freed("P") == {1, 2, 3}
    assert failure(pair) is FailCode.LEASE_LOST
    assert not pair.seen(Loaded)


def test_a_client_that_goes_between_read_and_answer_frees_both_sides() -> None:
    pair = acquainted()
    ask(pair)
    read_ended(pair)
    pair.decode.gone("d", "client gone")
    pair.deliver()
    assert not pair.seen(Loaded)
    assert pair.freed("D") == set(MINE)
    assert pair.freed("P") == {1, 2, 3}
    assert nothing_is_left(pair)


@pytest.mark.parametrize(("setting", "code"), [("transfer_s", "timed_out"), ("silence_s", "peer_lost")])
def test_where_prefill_never_answers_the_request_fails_in_time(setting: str, code: str) -> None:
    pair = acquainted(**{"transfer_s": 60.0, "silence_s": 60.0, setting: 7.0})
    pair.lose = lambda message: True
    ask(pair)
    read_ended(pair)
    pair.wait(6.75)
    assert not pair.seen(FreeBlocks)
    pair.wait(0.5)
    assert failure(pair) == code
    assert pair.freed("D") == set(MINE)
    assert not pair.seen(Loaded)


def test_one_that_prefill_leaves_unanswered_may_be_recomputed_in_other_blocks() -> None:
    pair = acquainted(on_failure="recompute")
    pair.lose = lambda message: True
    ask(pair)
    read_ended(pair)
    pair.wait(16)
    assert pair.seen(Recompute)
    assert pair.freed("D") == set(MINE)


def test_a_read_that_outlasts_what_prefill_has_promised_is_confirmed_first() -> None:
    pair = acquainted(silence_s=100.0)
    ask(pair)
    pair.deliver()
    pair.lose = lambda message: isinstance(message, Renewed)
    pair.wait(40)
    read_ended(pair)
    assert not pair.seen(Loaded)
    assert pair.decode.counters["confirmations"] == 1
    pair.lose = lambda message: False
    pair.wait(2)
    assert pair.seen(Loaded)


def test_a_reference_that_nobody_used_in_time_brings_nothing() -> None:
    pair = Pair("pull", prefill_settings=ProducerSettings(reference=ReferenceSettings(valid_s=5.0)))
    meet(pair)
    reference = pair.prefilled()
    pair.pass_silently(6)
    ask(pair, reference)
    read_ended(pair)
    pair.deliver()
    assert failure(pair) is FailCode.EXPIRED
    assert not pair.seen(Loaded)


def test_a_request_that_was_preempted_meanwhile_reads_again() -> None:
    pair = acquainted()
    ask(pair)
    assert pair.decode.preempted("d")
    pair.collect()
    abandoned(pair)
    assert pair.freed("D") == set(MINE)
    assert pair.decode.counters["early_reads_dropped"] == 1
    pair.decode.allocated("d", (BlockRun(0, (21, 22, 23)),))
    pair.deliver()
    assert [p.destination for p in pair.posted().pairs] == [21, 22, 23]
    pair.wait(1)
    read_ended(pair)
    assert pair.seen(Loaded)


@pytest.mark.parametrize("how", ["no fence", "another generation", "not met"])
def test_without_a_fence_nothing_is_posted_before_prefill_has_said_yes(how: str) -> None:
    pair = Pair("pull")
    if how != "not met":
        pair.decode.arrived("first", pair.prefilled("first", (4,), 16), 16)
        pair.deliver()
    if how != "no fence":
        pair.decode.reads_fenced(EngineRef("P/1", 2 if how == "another generation" else 1))
    ask(pair)
    assert not pair.seen(PostRead)
    pair.deliver()
    assert pair.seen(PostRead)
    assert pair.decode.counters["early_reads"] == 0


def test_a_peer_that_was_lost_is_not_read_from_early_until_it_is_met_again() -> None:
    pair = acquainted()
    pair.decode.peer_lost("P/1", FailCode.PEER_LOST, "the host says so")
    ask(pair)
    assert not pair.seen(PostRead)
    pair.deliver()
    assert pair.seen(PostRead)
