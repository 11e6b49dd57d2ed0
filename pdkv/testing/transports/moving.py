"""Rules about what a transport moves, and what it refuses to move."""

from __future__ import annotations

import json
from typing import Any

from pdkv.errors import ConnectorError, GeometryError, ProtocolError, StaleGenerationError
from pdkv.testing.rules import allowed, refused, require
from pdkv.testing.transports._registry import check, ways
from pdkv.testing.transports.bench import SCATTERED, TransportBench


@check
def tells_what_it_is(bench: TransportBench) -> None:
    require(bench.what["name"], "a transport has a name")
    require(ways(bench), "a transport can read, or write, or both")
    state = bench.d.ask("state")
    require(state.get("transport") == bench.what["name"], "describe_state() gives the name under 'transport'")
    require(state.get("registered") is False, "describe_state() says under 'registered' that nothing is")
    bench.meet()
    state = bench.d.ask("state")
    require(state.get("registered") is True, "describe_state() says under 'registered' that something is")
    require(state.get("peers") == ["P"], f"describe_state() names the peers under 'peers', not {state.get('peers')}")
    with allowed("describe_state() holds plain values"):
        json.dumps(state)


@check
def moves_exactly_the_named_blocks(bench: TransportBench) -> None:
    for reads in ways(bench):
        bench.meet()
        bench.move(SCATTERED, reads=reads)
        bench.require_moved(SCATTERED)
        bench.d.ask("unregister")
        bench.p.ask("unregister")


@check
def moves_layers_of_the_named_group_only(bench: TransportBench) -> None:
    groups = [0, 1, 3], [2]
    bench.meet(groups=[[f"layer.{layer}" for layer in layers] for layers in groups], layers=4)
    reads = ways(bench)[0]
    for group, layers in enumerate(groups):
        bench.d.ask("fill", seed=2)
        pairs = [(group, 7, 8), (group, 8, 9)]
        bench.move(pairs, reads=reads)
        bench.require_moved(pairs, layers=layers)
    with refused("a group that is not there", ProtocolError):
        bench.post([(2, 1, 1)], reads=reads)


@check
def moves_between_layouts_of_the_same_pages(bench: TransportBench) -> None:
    bench.build(bench.p, 1, layout="BLNHC", capacity=44, commits=(40,))
    bench.build(bench.d, 2, layout="LBNHC", commits=(10, 25, 40))
    for side, name in ((bench.p, "P"), (bench.d, "D")):
        side.ask("register", engine=name, generation=1)
    bench.introduce()
    bench.move(SCATTERED, reads=ways(bench)[0])
    bench.require_moved(SCATTERED)


@check
def runs_several_transfers_at_once(bench: TransportBench) -> None:
    bench.meet()
    reads = ways(bench)[0]
    numbers = [bench.post([pair], reads=reads) for pair in SCATTERED]
    for number in numbers:
        require(bench.ended(number, reads=reads) == "done", "each of several transfers ends as done")
    bench.require_moved(SCATTERED)


@check
def refuses_caches_that_do_not_fit(bench: TransportBench) -> None:
    bench.meet()
    others: list[dict[str, Any]] = [{"layers": 2}]
    if not bench.what["converts"]:
        others += [{"dtype": "bfloat16"}, {"heads": 1}, {"layout": "LBHNC"}]
    for number, shape in enumerate(others, 2):
        bench.p.ask("unregister")
        bench.build(bench.p, 1, **shape)
        bench.p.ask("register", engine="P", generation=number)
        metadata = bench.p.ask("describe")
        with refused(f"connect to a cache with {shape}", GeometryError):
            bench.d.ask("connect", engine="P", generation=number, metadata=metadata)
    if not bench.what["converts"]:
        bench.p.ask("unregister")
        bench.build(bench.p, 1)
        bench.p.ask("register", engine="P", generation=9)
        with refused("connect for some of the heads", GeometryError):
            bench.d.ask("connect", engine="P", generation=9, metadata=bench.p.ask("describe"), heads=[1, 1, 0])


@check
def refuses_metadata_that_is_not_its_own(bench: TransportBench) -> None:
    bench.meet()
    good = bench.p.ask("describe")
    require(len(good) // 2 <= 2**20, "describe() returns at most 1 MiB")
    for what, bad in (("no bytes", ""), ("half of it", good[: len(good) // 4 * 2]), ("noise", "93" * 100)):
        with refused(f"connect with {what}", ConnectorError):
            bench.d.ask("connect", engine="Q", generation=1, metadata=bad)
    with refused("connect with another engine's metadata", StaleGenerationError):
        bench.d.ask("connect", engine="Q", generation=1, metadata=good)
    bench.move(SCATTERED, reads=ways(bench)[0])
    bench.require_moved(SCATTERED)


@check
def refuses_another_generation_before_posting(bench: TransportBench) -> None:
    bench.meet()
    for reads in ways(bench):
        for generation in (0, 2):
            with refused(f"generation {generation} of a peer connected in 1", StaleGenerationError):
                bench.post(SCATTERED, reads=reads, generation=generation)
    with refused("an engine that was never connected", StaleGenerationError):
        bench.d.ask("post", engine="Q", generation=1, pairs=[[0, 1, 1]], reads=ways(bench)[0])
    bench.require_moved(())


@check
def refuses_blocks_that_are_not_there_before_posting(bench: TransportBench) -> None:
    bench.meet()
    for reads in ways(bench):
        for what, pairs in (
            ("a source that is not committed", [(0, 40, 1)]),
            ("a destination that is not committed", [(0, 1, 40)]),
            ("a good pair and a bad one", [(0, 1, 1), (0, 41, 2)]),
            ("a negative block", [(0, -1, 1)]),
            ("one destination twice", [(0, 1, 5), (0, 2, 5)]),
            ("no block", []),
        ):
            with refused(what, ProtocolError):
                bench.post(pairs, reads=reads)
    bench.require_moved(())


@check
def keeps_to_what_was_committed_when_it_registered(bench: TransportBench) -> None:
    bench.meet()
    reads = ways(bench)[0]
    for side in (bench.p, bench.d):
        side.ask("commit", blocks=48)
    with refused("a block committed after registering", ProtocolError):
        bench.post([(0, 45, 1)], reads=reads)
    bench.move([(0, 39, 1)], reads=reads)
