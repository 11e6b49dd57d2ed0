"""Rules about peers that are connected to by polling; a transport that has nothing to wait for connects at once."""

from __future__ import annotations

import time

from pdkv.errors import StaleGenerationError, TransportError
from pdkv.testing.rules import refused, require
from pdkv.testing.transports._registry import check, ways
from pdkv.testing.transports.bench import DEADLINE_S, SCATTERED, TransportBench


@check
def connects_by_polling(bench: TransportBench) -> None:
    bench.meet()
    reads = ways(bench)[0]
    side, other, name = (bench.d, bench.p, "P") if reads else (bench.p, bench.d, "D")
    side.ask("disconnect", engine=name)
    metadata = other.ask("describe")
    number = side.ask("begin_connect", engine=name, generation=1, metadata=metadata)
    deadline = time.monotonic() + DEADLINE_S
    while number is not None and not side.ask("poll_connect", number=number):
        require(time.monotonic() < deadline, f"connecting ends within {DEADLINE_S:g} s")
        other.ask("progress")
    bench.move(SCATTERED, reads=reads)
    bench.require_moved(SCATTERED)
    with refused("connect by polling to another generation than the metadata's", StaleGenerationError):
        number = side.ask("begin_connect", engine=name, generation=2, metadata=metadata)
        for _ in range(100):
            side.ask("poll_connect", number=number)


@check
def connects_to_nobody_who_was_given_up(bench: TransportBench) -> None:
    """By whoever began, or since the peer was disconnected, or is connected to once more."""
    bench.meet()
    reads = ways(bench)[0]
    side, other, name = (bench.d, bench.p, "P") if reads else (bench.p, bench.d, "D")
    metadata = other.ask("describe")
    for how in ("abandon_connect", "disconnect"):
        side.ask("disconnect", engine=name)
        if (number := side.ask("begin_connect", engine=name, generation=1, metadata=metadata)) is None:
            return
        side.ask(how, **({"number": number} if how == "abandon_connect" else {"engine": name}))
        with refused("poll what was given up", TransportError):
            side.ask("poll_connect", number=number)
        with refused("a peer whose connecting was given up", StaleGenerationError):
            bench.post(SCATTERED, reads=reads)
    bench.introduce()
    bench.move(SCATTERED, reads=reads)
    bench.require_moved(SCATTERED)
