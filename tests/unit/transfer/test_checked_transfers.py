"""Transfers that are done only when what has arrived is what was summed; on the host, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from checked_inproc import CheckedInproc

from pdkv.errors import GeometryError
from pdkv.testing import TRANSPORT_CHECKS, TransportBench, run_transport_check
from pdkv.testing.transports.bench import SCATTERED, LocalSide
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.checking import keeper, wire
from pdkv_connectors.checking.transfer import ANSWER_TIMEOUT_S, ASKED_AT_ONCE

pytestmark = pytest.mark.cpu

WAYS = pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
PAIRS = ((0, 4, 11), (0, 5, 12), (0, 9, 30))


class VirtualClock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1e6

    def monotonic(self) -> float:
        return self.now


CLOCK = VirtualClock()


@pytest.fixture(scope="module")
def shared() -> Iterator[TransportBench]:
    with TransportBench(lambda: CheckedInproc(copies_per_poll=7)) as bench:
        yield bench


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_a_transport_that_verifies_keeps_to_the_rule(shared: TransportBench, rule: str) -> None:
    run_transport_check(rule, shared)


@pytest.fixture
def bench() -> Iterator[TransportBench]:
    """P and D have met; all blocks hold noise."""
    with TransportBench(lambda: CheckedInproc(clock=CLOCK)) as bench:
        bench.open()
        bench.meet()
        yield bench
        bench.finish()


def transport_of(side: Any) -> CheckedInproc:
    assert isinstance(side, LocalSide)
    transport = side._side.transport
    assert isinstance(transport, CheckedInproc)
    return transport


def counted(side: Any, name: str) -> int:
    return transport_of(side).counts[name]


@WAYS
@pytest.mark.parametrize("offered", [True, False], ids=["offered", "not offered"])
def test_a_byte_that_changes_on_the_way_fails_the_transfer_and_is_counted(
    bench: TransportBench, reads: bool, offered: bool
) -> None:
    initiator = bench.d if reads else bench.p
    if offered:
        bench.p.ask("offer", blocks=[4, 5, 9])
    transport_of(initiator).on_arrival = lambda: bench.d.ask("damage", block=12, layer=1, byte=3)
    number = bench.post(PAIRS, reads=reads)
    assert bench.ended(number, reads=reads) == "failed"
    assert initiator.ask("reason", number=number) == "the bytes of block 5 are not those that its owner summed."
    assert counted(bench.d, "checksum_failures") == 1, "the receiving side counts"
    assert counted(initiator, "checksum_failures") == 1
    assert counted(initiator, "failed") == 1
    assert counted(initiator, "bytes") == 0
    transport_of(initiator).on_arrival = lambda: None
    bench.move(PAIRS, reads=reads)
    bench.require_moved(PAIRS)


@WAYS
@pytest.mark.parametrize("offered_again", [True, False])
def test_blocks_that_are_written_again_under_a_transfer_fail_it_and_are_no_damage(
    bench: TransportBench, reads: bool, offered_again: bool
) -> None:
    initiator = bench.d if reads else bench.p

    def write_again() -> None:
        bench.p.ask("withdraw", blocks=[5])
        bench.p.ask("mark", block=5, value=9)
        if offered_again:
            bench.p.ask("offer", blocks=[5])

    bench.p.ask("offer", blocks=[4, 5, 9])
    transport_of(initiator).before_move = write_again
    number = bench.post(PAIRS, reads=reads)
    assert bench.ended(number, reads=reads) == "failed"
    assert "block 5 was written again by its owner" in initiator.ask("reason", number=number)
    assert counted(initiator, "rewritten") == 1
    for side in (bench.p, bench.d):
        assert counted(side, "checksum_failures") == 0


@WAYS
def test_a_peer_that_does_not_answer_fails_the_transfer_at_the_deadline(bench: TransportBench, reads: bool) -> None:
    initiator = bench.d if reads else bench.p
    transport_of(initiator).is_silent = True
    number = bench.post(PAIRS, reads=reads)
    states = {initiator.ask("poll", number=number) for _ in range(100)}
    assert states == {"running"}
    CLOCK.now += ANSWER_TIMEOUT_S + 1
    assert initiator.ask("poll", number=number) == "failed"
    assert "has not answered" in initiator.ask("reason", number=number)
    assert counted(initiator, "checksum_failures") == 0
    if reads:
        bench.require_moved(())


@WAYS
def test_a_transfer_says_that_polls_move_it_while_it_sums_and_not_while_it_waits_for_the_peer(
    bench: TransportBench, reads: bool
) -> None:
    initiator = transport_of(bench.d if reads else bench.p)
    initiator.is_silent = True
    number = bench.post(PAIRS, reads=reads)
    (transfer,) = initiator._running
    moved = [transfer.moves_in_poll for _ in range(20) if transfer.poll() == "running"]
    assert any(moved) != reads, "a WRITE sums before it asks"
    assert not moved[-1], "the peer has to answer first"
    CLOCK.now += ANSWER_TIMEOUT_S + 1
    assert bench.ended(number, reads=reads) == "failed"
    initiator.is_silent = False
    number = bench.post(PAIRS, reads=reads)
    (transfer,) = initiator._running
    moved = []
    initiator.on_arrival = moved.clear
    while transfer.poll() == "running":
        moved.append(transfer.moves_in_poll)
    assert any(moved) == reads, "a READ sums what has arrived"
    assert bench.ended(number, reads=reads) == "done"


def test_a_transfer_that_is_abandoned_while_its_owner_is_asked_has_ended(bench: TransportBench) -> None:
    transport_of(bench.d).is_silent = True
    number = bench.post(PAIRS)
    assert bench.d.ask("poll", number=number) == "running"
    assert bench.d.ask("abandon", number=number) is True
    assert bench.d.ask("poll", number=number) == "failed"
    assert counted(bench.d, "abandoned") == 1
    bench.require_moved(())
    bench.d.ask("unregister")


def test_a_transfer_that_is_abandoned_under_way_ends_when_its_bytes_have(bench: TransportBench) -> None:
    transport = transport_of(bench.d)
    transport.copies_per_poll = 1
    number = bench.post(SCATTERED)
    transport.before_move = lambda: transport.counts.update(moving=1)
    while not transport.counts["moving"]:
        bench.d.ask("poll", number=number)
    assert bench.d.ask("abandon", number=number) is False
    assert bench.ended(number) == "failed"
    assert len(transport.questions) == 1, "nothing is compared that nobody wants"


@WAYS
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1noise",
        wire.encode(wire.Sums(b"12345678")),
        wire.encode(wire.Sums(b"1234567")),
        wire.encode(wire.Compared(70)),
        wire.encode(wire.Refused("there is no such block")),
    ],
)
def test_an_answer_that_is_none_fails_the_transfer_only(bench: TransportBench, reads: bool, answer: bytes) -> None:
    initiator = bench.d if reads else bench.p
    transport_of(initiator).said = lambda body: answer
    number = bench.post(PAIRS, reads=reads)
    assert bench.ended(number, reads=reads) == "failed"
    assert initiator.ask("reason", number=number)
    assert counted(initiator, "checksum_failures") == 0
    transport_of(initiator).said = lambda body: body
    bench.move(PAIRS, reads=reads)


@WAYS
def test_long_lists_are_asked_for_in_parts(bench: TransportBench, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_SUMS", 7)  # two blocks of three layers
    bench.move(SCATTERED, reads=reads)
    bench.require_moved(SCATTERED)
    asked = len(transport_of(bench.d if reads else bench.p).questions)
    assert asked == -(-len(SCATTERED) // 2) > ASKED_AT_ONCE
    damaged = SCATTERED[-1][2]
    transport_of(bench.d if reads else bench.p).on_arrival = lambda: bench.d.ask(
        "damage", block=damaged, layer=2, byte=1
    )
    assert bench.ended(bench.post(SCATTERED, reads=reads), reads=reads) == "failed"
    assert counted(bench.d, "checksum_failures") == 1


@WAYS
def test_caches_with_different_numbers_of_blocks_are_compared_block_by_block(reads: bool) -> None:
    with TransportBench(CheckedInproc) as bench:
        bench.open()
        bench.build(bench.p, 1, capacity=90, commits=(10, 30, 80))
        bench.build(bench.d, 2, capacity=30, commits=(24,))
        for side, name in ((bench.p, "P"), (bench.d, "D")):
            side.ask("register", engine=name, generation=1)
        bench.introduce()
        bench.p.ask("offer", blocks=[*range(60, 80)])
        pairs = [(0, 60 + index, 2 + index) for index in range(20)] + [(0, 0, 23)]
        bench.move(pairs, reads=reads)
        bench.require_moved(pairs)
        bench.finish()


def answered(side: Any, question: wire.Question | bytes) -> wire.Answer:
    steps = transport_of(side).keeper.answer(question if isinstance(question, bytes) else wire.encode(question))
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return wire.decode_answer(done.value)


def ids(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(4, "little", signed=True) for block in blocks)


P = EngineRef("P", 1)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (wire.Wanted(EngineRef("P", 2), 0, ids(1)), "in generation 2 was asked, this is 'P' in 1"),
        (wire.Wanted(EngineRef("Q", 1), 0, ids(1)), "'Q'"),
        (wire.Wanted(P, 1, ids(1)), "KV-cache group 1"),
        (wire.Wanted(P, 0, ids(1, 40)), "block 40"),
        (wire.Wanted(P, 0, ids(1, -1)), "negative"),
        (wire.Wanted(P, 0, b"12345"), "5 bytes"),
        (wire.Compare(P, 0, ids(1), b"1234567812345678"), "16 bytes of sums"),
        (wire.Compare(P, 0, ids(41), bytes(24)), "block 41"),
        (b"\x93\x01\x02\x03", "not valid"),
        (b"", "not valid"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_with_the_reason(
    bench: TransportBench, question: wire.Question | bytes, reason: str
) -> None:
    answer = answered(bench.p, question)
    assert isinstance(answer, wire.Refused)
    assert reason in answer.reason


def test_more_blocks_than_an_answer_has_room_for_are_refused(
    bench: TransportBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_SUMS", 7)
    assert isinstance(answered(bench.p, wire.Wanted(P, 0, ids(1, 2))), wire.Sums)
    assert isinstance(answered(bench.p, wire.Wanted(P, 0, ids(1, 2, 3))), wire.Refused)
    assert keeper.blocks_of_question(100) == 1


def test_a_writer_cannot_count_damage_where_there_is_none(bench: TransportBench) -> None:
    sums = answered(bench.p, wire.Wanted(P, 0, ids(7)))
    assert isinstance(sums, wire.Sums)
    assert answered(bench.p, wire.Compare(P, 0, ids(7), sums.sums, is_final=True)) == wire.Compared(-1)
    assert counted(bench.p, "checksum_failures") == 0
    assert answered(bench.p, wire.Compare(P, 0, ids(7), bytes(24))) == wire.Compared(0)
    assert counted(bench.p, "checksum_failures") == 0, "the writer has yet to look at its own blocks"


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"layout": "LHBNC", "capacity": 40, "commits": (40,)}, "pages of layout LHBNC are not runs of memory"),
        ({"page_nbytes": 96, "dtype": "bfloat16"}, "pages of 12 bytes a head and token"),
    ],
)
def test_caches_that_cannot_be_summed_are_refused_when_they_are_registered(shape: dict[str, Any], reason: str) -> None:
    side = LocalSide(CheckedInproc, "host")
    side.ask("open")
    side.ask("build", **{"page_nbytes": 1536, **shape})
    with pytest.raises(GeometryError, match=reason):
        side.ask("register", engine="P", generation=1)
    side.ask("finish")
