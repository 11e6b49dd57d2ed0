"""Rules about how registrations, connections and transfers begin and end."""

from __future__ import annotations

from contextlib import suppress

from pdkv.errors import PdkvError, StaleGenerationError, StateError, TransferTimeoutError
from pdkv.testing.rules import allowed, refused, require
from pdkv.testing.transports._registry import check, ways
from pdkv.testing.transports.bench import SCATTERED, TransportBench


@check
def registers_once_and_again_after_unregistering(bench: TransportBench) -> None:
    for what, arguments in (
        ("describe", {}),
        ("connect", {"engine": "P", "generation": 1, "metadata": ""}),
        ("post", {"engine": "P", "generation": 1, "pairs": [[0, 1, 1]], "reads": ways(bench)[0]}),
    ):
        with refused(f"{what} before anything is registered", StateError):
            bench.d.ask(what, **arguments)
    bench.build(bench.d, 2, commits=())
    with refused("register with nothing committed", StateError):
        bench.d.ask("register", engine="D", generation=1)
    bench.meet()
    with refused("register a second time", StateError):
        bench.d.ask("register", engine="D", generation=2)
    for _ in range(2):
        bench.d.ask("unregister")
    with refused("describe after unregister", StateError):
        bench.d.ask("describe")
    bench.d.ask("register", engine="D", generation=1)
    bench.introduce()
    bench.move(SCATTERED, reads=ways(bench)[0])
    bench.require_moved(SCATTERED)


@check
def unregister_is_a_fence(bench: TransportBench) -> None:
    """A peer that knows old metadata neither reads nor writes the memory, there or not, nor harms its owner."""
    reads = ways(bench)[0]
    owner = bench.p if reads else bench.d
    for released in (False, True):
        bench.meet()
        bench.move(SCATTERED[:1], reads=reads)
        owner.ask("unregister")
        if released:
            owner.ask("release")
        try:
            state = bench.ended(bench.post(SCATTERED[1:3], reads=reads), reads=reads)
        except PdkvError:
            state = "failed"
        require(state == "failed", f"a transfer with a peer that has unregistered fails, it does not end as {state}")
        require(owner.ask("state")["registered"] is False, "the owner lives")
        for side in (bench.p, bench.d):
            side.ask("unregister")


@check
def serves_again_in_a_new_generation(bench: TransportBench) -> None:
    bench.meet()
    reads = ways(bench)[0]
    bench.move(SCATTERED, reads=reads)
    old = bench.p.ask("describe")
    bench.renew()
    if reads:
        with refused("the old generation, once the new one is connected", StaleGenerationError):
            bench.post(SCATTERED)
    with refused("connect to an older generation than the one that is connected", StaleGenerationError):
        bench.d.ask("connect", engine="P", generation=1, metadata=old)
    bench.move(SCATTERED, reads=reads, generation=2 if reads else 1)
    bench.require_moved(SCATTERED, seed=3)


@check
def disconnects_and_connects_again(bench: TransportBench) -> None:
    bench.meet()
    reads = ways(bench)[0]
    side, peer = (bench.d, "P") if reads else (bench.p, "D")
    for _ in range(2):
        side.ask("disconnect", engine=peer)
    side.ask("disconnect", engine="nobody")
    with refused("a peer that was disconnected", StaleGenerationError):
        bench.post(SCATTERED, reads=reads)
    for _ in range(2):
        bench.introduce()
    bench.move(SCATTERED, reads=reads)
    bench.require_moved(SCATTERED)


@check
def lets_a_running_transfer_end_when_its_peer_is_disconnected(bench: TransportBench) -> None:
    bench.meet()
    reads = ways(bench)[0]
    number = bench.post(SCATTERED, reads=reads)
    (bench.d if reads else bench.p).ask("disconnect", engine="P" if reads else "D")
    if bench.ended(number, reads=reads) == "done":
        bench.require_moved(SCATTERED)


@check
def unregisters_only_when_its_transfers_have_ended(bench: TransportBench) -> None:
    bench.meet()
    reads = ways(bench)[0]
    side = bench.d if reads else bench.p
    number = bench.post(SCATTERED, reads=reads)
    try:
        side.ask("unregister")
    except StateError:
        require(bench.ended(number, reads=reads) == "done", "a refused unregister() leaves the transfer alone")
        side.ask("unregister")
    require(side.ask("poll", number=number) != "running", "nothing runs once unregister() has returned")


@check
def waits_no_longer_than_told(bench: TransportBench) -> None:
    bench.meet()
    reads = ways(bench)[0]
    side = bench.d if reads else bench.p
    number = bench.post(SCATTERED, reads=reads)
    with suppress(TransferTimeoutError):
        state = side.ask("wait", number=number, within_s=0.0)
        require(state != "running", "wait() returns an end or raises TransferTimeoutError")
    bench.ended(number, reads=reads)
    with allowed("wait() for a transfer that has ended"):
        side.ask("wait", number=number, within_s=0.0)
    bench.require_moved(SCATTERED)


@check
def an_abandoned_transfer_that_has_ended_writes_no_more(bench: TransportBench) -> None:
    bench.meet()
    for reads in ways(bench):
        side = bench.d if reads else bench.p
        number = bench.post(SCATTERED, reads=reads)
        over = side.ask("abandon", number=number)
        if over:
            require(side.ask("poll", number=number) != "running", "abandon() returns True only for what has ended")
        else:
            bench.ended(number, reads=reads)
        bench.d.ask("mark", block=10, value=7)
        for _ in range(20):
            side.ask("poll", number=number)
            for other in (bench.p, bench.d):
                other.ask("progress")
        require(bench.d.ask("is_marked", block=10, value=7), "what has ended writes no more")


@check
def says_why_a_transfer_failed(bench: TransportBench) -> None:
    bench.meet()
    reads = ways(bench)[0]
    side, owner = (bench.d, bench.p) if reads else (bench.p, bench.d)
    owner.ask("close")
    try:
        number = bench.post(SCATTERED, reads=reads)
    except PdkvError:
        return
    require(bench.ended(number, reads=reads) == "failed", "a transfer with a peer that has closed fails")
    require(side.ask("reason", number=number), "a failed transfer has a reason")


@check
def close_ends_everything(bench: TransportBench) -> None:
    bench.meet()
    reads = ways(bench)[0]
    side = bench.d if reads else bench.p
    number = bench.post(SCATTERED, reads=reads)
    for _ in range(2):
        side.ask("close")
    require(side.ask("poll", number=number) != "running", "nothing runs once close() has returned")
    side.ask("unregister")
    with refused("register after close", StateError):
        side.ask("register", engine="D" if reads else "P", generation=2)


@check
def leaves_no_descriptor_open(bench: TransportBench) -> None:
    counts = []
    for _ in range(3):
        bench.meet()
        bench.move(SCATTERED, reads=ways(bench)[0])
        bench.finish()
        counts.append([side.ask("open_fds") for side in (bench.p, bench.d)])
        bench.open()
    require(counts[2] <= counts[1], f"open file descriptors do not become more with each use: {counts}")
