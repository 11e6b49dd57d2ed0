"""Rules about READs that are posted before their owner has said that it still holds the blocks.

Each transport is held to its own answer: :meth:`pdkv.transfer.transport.Transport.fences_reads`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pdkv.errors import PdkvError, TransferTimeoutError
from pdkv.testing.rules import refused, require
from pdkv.testing.transports._registry import check
from pdkv.testing.transports.bench import DEADLINE_S, SCATTERED, Pairs, TransportBench

#: A byte that neither side's blocks hold: what the owner fills its memory with, once it has taken it back.
TAKEN = 200
#: A READ of some MiB, which leaves four blocks of D alone.
MANY: Pairs = tuple((0, block, 35 - block) for block in range(36))
#: How long a READ may take to end by itself, or once it was abandoned, while its owner hangs.
ENDS_WITHIN_S = 10.0


@check
def says_whether_it_fences_reads_from_a_peer(bench: TransportBench) -> None:
    """Yes or no, the same for as long as the peer is connected; no of a peer that is not, in just this generation."""
    _says_no_of(bench, "P", 1, "while nothing is registered")
    bench.meet()
    answer = bench.d.ask("fences_reads", engine="P", generation=1)
    require(isinstance(answer, bool), f"fences_reads() is True or False, not {answer!r}")
    require(bench.what["can_read"] or not answer, "what cannot read does not fence READs")
    for engine, generation in (("P", 0), ("P", 2), ("Q", 1)):
        _says_no_of(bench, engine, generation, "when P is connected in generation 1")
    if bench.what["can_read"]:
        bench.move(SCATTERED)
    bench.p.ask("unregister")
    same = bench.d.ask("fences_reads", engine="P", generation=1) == answer
    require(same, f"fences_reads() says {answer} of a peer whatever was read, and whether or not it has unregistered")
    bench.p.ask("register", engine="P", generation=2)
    bench.introduce(p_generation=2)
    require(bench.d.ask("fences_reads", engine="P", generation=2) == answer, "a new generation is answered as the last")
    _says_no_of(bench, "P", 1, "when P is connected in generation 2")
    bench.d.ask("disconnect", engine="P")
    _says_no_of(bench, "P", 2, "once it was disconnected")


@check
def keeps_a_fenced_read_from_what_its_owner_has_taken_back(bench: TransportBench) -> None:
    """Whenever P takes its memory back, the READ ends; it brings what P had registered, or fails; it spoils nothing.

    First P writes something else to the memory, then it has none.
    """
    if not _fences(bench):
        return
    begun = (_after_polls(1), _while_it_is_waited_for)
    for take_back, then, moments in (
        ("unregister", {"do": "mark_all", "value": TAKEN}, (_before_it_is_posted, _after_polls(0), *begun)),
        ("close", {"do": "mark_all", "value": TAKEN}, begun),
        ("unregister", {"do": "release"}, begun),
    ):
        for read in moments:
            bench.finish()
            bench.open()
            bench.meet(page_nbytes=bench.large_page_nbytes)
            bench.p.ask("offer", blocks=list(range(0, 36, 2)))  # for the others P is asked

            def taken_back(how: str = take_back, use: dict[str, Any] = then) -> None:
                bench.p.ask(how)
                bench.p.ask(**use)

            _require_unharmed(bench, read(bench, taken_back))


@check
def ends_a_fenced_read_without_its_owner(bench: TransportBench) -> None:
    """From an owner that hangs: the READ ends by itself, or when it is abandoned, and then writes no more."""
    if not _fences(bench):
        return
    for offered in ([], [source for _, source, _ in SCATTERED]):
        bench.finish()
        bench.open()
        bench.meet()
        bench.p.ask("offer", blocks=offered)
        with bench.hanging(bench.p):
            number = bench.post(SCATTERED)
            bench.d.ask("poll", number=number)
            bench.d.ask("abandon", number=number)
            deadline = time.monotonic() + ENDS_WITHIN_S
            while bench.d.ask("poll", number=number) == "running":
                require(time.monotonic() < deadline, "an abandoned READ ends without its owner's help")
            bench.d.ask("mark", block=10, value=TAKEN)
        for _ in range(20):
            bench.p.ask("progress")
            bench.d.ask("poll", number=number)
        require(bench.d.ask("is_marked", block=10, value=TAKEN), "what has ended writes no more")


def _fences(bench: TransportBench) -> bool:
    """Let P and D meet; whether D's side fences READs from P."""
    bench.meet()
    return bool(bench.d.ask("fences_reads", engine="P", generation=1))


def _says_no_of(bench: TransportBench, engine: str, generation: int, when: str) -> None:
    """An answer about somebody whom D does not know."""
    answer = bench.d.ask("fences_reads", engine=engine, generation=generation)
    require(answer is False, f"fences_reads() says False of {engine} in generation {generation} {when}, not {answer}")


# When P takes its memory back; each gives the state in which the READ ended.


def _before_it_is_posted(bench: TransportBench, taken_back: Callable[[], None]) -> str:
    taken_back()
    with refused("a READ from a peer that has taken its memory back"):
        number = bench.post(MANY)
        if bench.ended(number) == "failed":
            raise PdkvError(bench.d.ask("reason", number=number))
    return "failed"


def _after_polls(polls: int) -> Callable[[TransportBench, Callable[[], None]], str]:
    def read(bench: TransportBench, taken_back: Callable[[], None]) -> str:
        number = bench.post(MANY)
        for _ in range(polls):
            bench.d.ask("poll", number=number)
        taken_back()
        return bench.ended(number)

    return read


def _while_it_is_waited_for(bench: TransportBench, taken_back: Callable[[], None]) -> str:
    number = bench.post(MANY)
    with bench.meanwhile(bench.d, "wait", number=number, within_s=DEADLINE_S) as state:
        taken_back()
        try:
            return str(state.result())
        except TransferTimeoutError:
            require(False, f"a transfer ends within {DEADLINE_S:g} s")
            raise


def _require_unharmed(bench: TransportBench, state: str) -> None:
    """D's cache after a READ that has ended so: nothing in it is what P's memory held after P had taken it back."""
    stained = bench.d.ask("stained", value=TAKEN)
    places = f"[layer, block] {stained[:6]}"
    require(not stained, f"nothing is read from memory that its owner has taken back, as was to {places}")
    destinations = {to for _, _, to in MANY}
    moved = {str(to): [1, source] for _, source, to in MANY} if state == "done" else {}
    may_be_anything = destinations if state == "failed" else set()
    wrong = [at for at in bench.d.ask("differing", seed=2, moved=moved) if at[1] not in may_be_anything]
    places = f"wrong: [layer, block] {wrong[:6]}"
    require(not wrong, f"what a READ that is done was to bring is there, and no other block is changed; {places}")
