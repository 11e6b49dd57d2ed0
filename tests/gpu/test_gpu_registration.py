"""What NIXL makes of registrations over CUDA virtual memory, between two processes on one device.

A registration over several chunks is accepted and may then move wrong bytes without an error; which of right, wrong and
error comes out depends on the transport. The table says what was seen. What is asserted is pdkv's own rule: ranges of
`extents()` are always right, and a range over a chunk border is refused before NIXL sees it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from gpu_peer import GpuPeer

from pdkv.testing.child import ChildEnded, ChildError

pytest.importorskip("nixl", reason="NIXL is not installed", exc_type=ImportError)

pytestmark = pytest.mark.gpu

PAGE, GRANULE_BLOCKS = 64 << 10, 32
CORES_PER_PAIR = 4  # two processes and their agents' threads, which spin
BLOCKS = 4096
NBYTES = BLOCKS * PAGE
MIB = 1 << 20
#: Blocks committed after each step; every step adds one chunk.
CHUNKS = {
    "1 x 256 MiB": [BLOCKS],
    "2 x 128 MiB": [BLOCKS // 2, BLOCKS],
    "128 x 2 MiB": list(range(GRANULE_BLOCKS, BLOCKS + 1, GRANULE_BLOCKS)),
}
PROBES = {
    "first chunk": (0, MIB),
    "last chunk": (NBYTES - MIB, MIB),
    "over a border": (NBYTES // 2 - MIB, 2 * MIB),
    "all": (0, NBYTES),
}

ENDS = {"timeout", "no answer", "owner died", "reader died", "nobody died"}


class Pair:
    """An owner with a cache, and a reader that knows it."""

    def __init__(self, folder: Path, name: str, stack: ExitStack, **variables: str) -> None:
        self.owner = stack.enter_context(GpuPeer(f"owner-{name}", folder, **variables))
        self.reader = stack.enter_context(GpuPeer(f"reader-{name}", folder, **variables))
        self.state: dict[str, Any] = {}

    def build(self, commits: list[int]) -> None:
        """Build the cache, and an agent on both sides."""
        self.state = self.owner.ask("build", num_blocks=BLOCKS, commits=commits)
        self.owner.ask("fill", seed=1)
        for peer in (self.owner, self.reader):
            peer.ask("agent")

    def register(self, whole: bool) -> None:
        """Register in the owner."""
        ranges = [[self.state["address"], NBYTES]] if whole else [extent[:2] for extent in self.state["extents"]]
        self.owner.ask("register", ranges=ranges)

    def connect(self) -> None:
        """Let the reader know what the owner has registered."""
        metadata = self.owner.ask("metadata")
        assert self.reader.ask("connect", metadata=metadata, state=self.state, nbytes=NBYTES) == self.owner.name

    def transfer(self, operation: str, probe: str, seed: int = 1, split: bool = True, **more: Any) -> dict[str, Any]:
        """One transfer, looked at on the side where the bytes arrive."""
        offset, nbytes = PROBES[probe]
        try:
            got: dict[str, Any] = self.reader.ask(
                "transfer",
                peer=self.owner.name,
                operation=operation,
                base=self.state["address"],
                offset=offset,
                nbytes=nbytes,
                seed=seed,
                split=split,
                **more,
            )
            if got["outcome"] == "posted":
                held = self.owner.ask("holds", offset=offset, nbytes=nbytes, seed=seed)
                got["outcome"] = "right" if held else "wrong"
        except (ChildEnded, TimeoutError) as error:
            who = "owner" if not self.owner.is_alive() else "reader" if not self.reader.is_alive() else "nobody"
            got = {"outcome": f"{who} died" if isinstance(error, ChildEnded) else "no answer"}
        return got


def rows_of(folder: Path, chunks: str, whole: bool) -> Iterator[dict[str, Any]]:
    """All probes of one way to register, in processes of their own."""
    name = f"{chunks}-{'whole' if whole else 'extents'}".replace(" ", "")
    with ExitStack() as stack:
        pair = Pair(folder, name, stack)
        pair.build(CHUNKS[chunks])
        pair.register(whole)
        pair.connect()
        way = {"chunks": chunks, "registered": "whole" if whole else "extents"}
        for operation, probe in product(("READ", "WRITE"), PROBES):
            got = pair.transfer(operation, probe, seed=1 if operation == "READ" else 2, split=not whole)
            yield {**way, "operation": operation, "probe": probe, **got}
            if got["outcome"] in ENDS:  # nothing can be learned from these two processes any more
                break
        pair.reader.close()
        pair.owner.close()
        yield {**way, "transports": pair.reader.transports()}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every way to register, as many at a time as there are cores for."""
    folder = tmp_path_factory.mktemp("registration")
    ways = [(chunks, whole) for chunks in CHUNKS for whole in (True, False)]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_PER_PAIR)) as pool:
        found = pool.map(lambda way: list(rows_of(folder, *way)), ways)
        return [row for rows in found for row in rows]


def test_every_range_of_an_extent_moves_right(table: list[dict[str, Any]], record: Callable[..., None]) -> None:
    for row in table:
        record("registration", **row)
    by_extent = [row for row in table if row["registered"] == "extents" and "outcome" in row]
    assert len(by_extent) == 2 * len(PROBES) * len(CHUNKS)
    assert {row["outcome"] for row in by_extent} == {"right"}


def test_one_chunk_registered_whole_moves_right(table: list[dict[str, Any]]) -> None:
    rows = [row for row in table if row["chunks"] == "1 x 256 MiB" and "outcome" in row]
    assert {row["outcome"] for row in rows} == {"right"}


class Refuser:
    """In the place of a NIXL agent that must not be asked."""

    def register_memory(self, *_: Any) -> None:
        pytest.fail("the range has reached NIXL")


def test_a_registration_over_a_border_is_refused_before_nixl_sees_it(make_cache: Callable[..., Any]) -> None:
    from pdkv.errors import ExtentError
    from pdkv_connectors.vllm.guard import GuardedAgent

    cache = make_cache(layers=1, num_blocks=BLOCKS)
    cache.commit(BLOCKS // 2)
    cache.commit(BLOCKS)
    with pytest.raises(ExtentError, match="crosses"):
        GuardedAgent(Refuser(), cache).register_memory([(cache.address, NBYTES, 0, "")])
    assert [extent.nbytes for extent in cache.extents()] == [NBYTES // 2] * 2


@pytest.fixture
def registered_pair(tmp_path: Path) -> Iterator[Pair]:
    """One chunk, registered; the reader knows it."""
    with ExitStack() as stack:
        pair = Pair(tmp_path, "stale", stack)
        pair.build([BLOCKS])
        pair.register(whole=False)
        pair.connect()
        yield pair


def test_a_stale_read_is_refused_by_generation_and_a_new_handshake_reads_right(
    registered_pair: Pair, record: Callable[..., None]
) -> None:
    pair = registered_pair
    assert pair.transfer("READ", "all", generation=pair.state["generation"])["outcome"] == "right"
    pair.owner.ask("deregister")
    record("release with a connected peer", **pair.owner.ask("release"))
    pair.state = pair.owner.ask("recommit")
    pair.owner.ask("fill", seed=2)
    pair.register(whole=False)
    with pytest.raises(ChildError) as refused:
        pair.transfer("READ", "all", seed=2, generation=pair.state["generation"])
    assert refused.value.kind == "StaleGenerationError"

    pair.reader.ask("disconnect", peer=pair.owner.name)
    pair.connect()
    assert pair.transfer("READ", "all", seed=2, generation=pair.state["generation"])["outcome"] == "right"


def test_what_a_stale_read_does_where_nobody_checks(registered_pair: Pair, record: Callable[..., None]) -> None:
    pair = registered_pair
    assert pair.transfer("READ", "all")["outcome"] == "right"
    pair.owner.ask("release")
    pair.state = {**pair.state, **pair.owner.ask("recommit")}
    pair.owner.ask("fill", seed=2)
    got = pair.transfer("READ", "all", seed=2)
    record("stale read, unchecked", **got, old_bytes=got["outcome"] == "wrong")
    # Right bytes are luck: the emulation reads through the owner's addresses. Old bytes and errors are seen elsewhere;
    # a transfer that never ends would be none of these.
    assert got["outcome"] != "timeout"
