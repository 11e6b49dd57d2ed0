"""Engines of unequal tensor parallelism and block sizes, each rank a process, over the ipc transport on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ipc_peers import DEADLINE_S, Peer

from pdkv.transfer.blocks import BlockRun, pair_by_index, units_of
from pdkv.transfer.shards import Shards, parts_of

pytestmark = pytest.mark.cpu

HEADS, PROMPT = 4, 70  # tokens, of which the last block is not full
#: Tokens in a block, and the prompt's blocks, of the engine of one rank and of that of two.
SIZES = {1: 16, 2: 32}
BLOCKS = {1: [5, 9, 2, 11, 7], 2: [3, 8, 1]}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, list[Peer]]]:
    """The ranks of two engines, by the engine's number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    found = {1: [Peer("A0", folder, "host")], 2: [Peer("B0", folder, "host"), Peer("B1", folder, "host")]}
    try:
        yield found
    finally:
        for peer in [peer for peers in found.values() for peer in peers]:
            peer.close()


@pytest.fixture
def engines(processes: dict[int, list[Peer]]) -> Iterator[dict[int, list[Peer]]]:
    """The same, registered, their caches zero."""
    everybody = [(number, peer) for number, peers in processes.items() for peer in peers]
    for number, peer in everybody:
        peer.ask("open")
        peer.ask("build_rank", heads=HEADS // number, tokens=SIZES[number])
        peer.ask("register", engine=peer.name, generation=1)
    yield processes
    for _, peer in everybody:
        peer.ask("finish")


@pytest.mark.parametrize(("there", "here", "cached"), [(1, 2, 0), (1, 2, 1), (2, 1, 0), (2, 1, 1)])
def test_each_rank_reads_its_heads_of_the_tokens_that_its_engine_lacks(
    engines: dict[int, list[Peer]], there: int, here: int, cached: int
) -> None:
    sources, destinations = engines[there], engines[here]
    theirs, ours = (Shards(2, HEADS, 128, ranks) for ranks in (there, here))
    for rank, peer in enumerate(sources):
        peer.ask("number", blocks=BLOCKS[there], first_head=theirs.first_head(rank))
    runs = (BlockRun(0, tuple(BLOCKS[there])),), (BlockRun(cached, tuple(BLOCKS[here][cached:])),)
    pairs = [
        (pair.source, pair.destination) for pair in pair_by_index(*units_of(*runs, (SIZES[there], SIZES[here]), PROMPT))
    ]
    for rank, peer in enumerate(destinations):
        numbers = []
        for part in parts_of(rank, ours, theirs):
            heads = part.heads
            assert heads is not None
            source = sources[part.rank]
            peer.meet(source, heads=[heads.count, heads.source, heads.destination])
            numbers.append(peer.post(source, pairs))
        assert [peer.ask("wait", number=number, within_s=DEADLINE_S) for number in numbers] == ["done"] * len(numbers)
        tokens = {"first": cached * SIZES[here], "end": 80}  # five units of 16 have a token of the prompt
        assert peer.ask("numbered", blocks=BLOCKS[here], first_head=ours.first_head(rank), **tokens) == [True, True]
