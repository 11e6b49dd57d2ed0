"""Rules about what a transport that verifies lets through, and what it does not."""

from __future__ import annotations

from pdkv.testing.rules import require
from pdkv.testing.transports._registry import check, ways
from pdkv.testing.transports.bench import SCATTERED, TransportBench

#: The source of the first pairs, which is offered; of another one, which is not; a layer, and a byte of its page.
OFFERED, NOT_OFFERED, LAYER, BYTE = 4, 33, 2, 77


@check
def fails_what_differs_from_its_sums_and_counts_it(bench: TransportBench) -> None:
    """A byte that changed after its block was summed. A transport that does not verify has nothing to keep to."""
    if not bench.what["verifies"]:
        return
    for reads in ways(bench):
        bench.meet()
        bench.p.ask("offer", blocks=[OFFERED, 5])
        bench.p.ask("damage", block=OFFERED, layer=LAYER, byte=BYTE)
        before = _failures(bench)
        number = bench.post(SCATTERED, reads=reads)
        state = bench.ended(number, reads=reads)
        reason = (bench.d if reads else bench.p).ask("reason", number=number)
        require(state == "failed", f"a transfer with a block that is not what was summed fails, it ends as {state}")
        require(f"block {OFFERED}" in reason, f"the reason names the block of the source, not: {reason}")
        require(_failures(bench) == before + 1, "the receiving side counts it under checksum_failures, once")
        # The same blocks move once they are whole again, and once they have been offered as they are now.
        bench.p.ask("damage", block=OFFERED, layer=LAYER, byte=BYTE)
        bench.move(SCATTERED, reads=reads)
        bench.require_moved(SCATTERED)
        require(_failures(bench) == before + 1, "what was right is not counted")
        for side in (bench.d, bench.p):
            side.ask("unregister")


@check
def does_not_take_new_contents_for_damage(bench: TransportBench) -> None:
    """Blocks that were withdrawn and written again, offered anew or not, and blocks of another generation."""
    if not bench.what["verifies"]:
        return
    for reads in ways(bench):
        bench.meet()
        bench.p.ask("offer", blocks=[OFFERED, 5, 6])
        bench.move(SCATTERED, reads=reads)
        bench.p.ask("withdraw", blocks=[OFFERED, 5])
        for block, value in ((OFFERED, 11), (5, 12), (NOT_OFFERED, 13)):
            bench.p.ask("mark", block=block, value=value)
        bench.p.ask("offer", blocks=[5])
        pairs = [(0, OFFERED, 1), (0, 5, 2), (0, NOT_OFFERED, 3)]
        bench.move(pairs, reads=reads)
        marks = [bench.d.ask("is_marked", block=to, value=value) for to, value in ((1, 11), (2, 12), (3, 13))]
        require(all(marks), "what the owner holds now is what arrives")
        bench.renew()
        bench.move(SCATTERED, reads=reads, generation=2 if reads else 1)
        bench.require_moved(SCATTERED, seed=3)
        state = bench.d.ask("state")
        require(not state.get("checksum_failures"), "nothing of this is counted as damage")
        for side in (bench.d, bench.p):
            side.ask("unregister")


def _failures(bench: TransportBench) -> int:
    return int(bench.d.ask("state").get("checksum_failures", 0))
