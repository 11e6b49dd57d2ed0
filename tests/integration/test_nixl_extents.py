"""What a real NIXL peer in another process can read and write of a growable cache, and what it can do to its owner."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from nixl_peer import EVEN, NixlPeer, Pair

from pdkv.testing.child import ChildError

pytestmark = pytest.mark.nixl

#: Over tcp the owner's own process serves a peer's read, so that it is the owner that touches the memory.
TCP = "tcp,self"
LAYERS = 3
#: Blocks after each of three commits: none of them ends on a granule (8.5 pages of `UNEVEN` fill one).
STEPS = (10, 25, 40)


@pytest.fixture(params=["", TCP], ids=["default-transports", "tcp"], scope="module")
def agents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two processes with an agent each."""
    yield from start_pair(tmp_path_factory.mktemp("agents"), request.param)


@pytest.fixture
def pair(agents: Pair) -> Iterator[Pair]:
    """The same two processes, knowing nothing of each other and of no cache, before and after a test."""
    pair = Pair(agents.owner, agents.reader)
    yield pair
    pair.disconnect()


@pytest.fixture
def doomed_pair(tmp_path: Path) -> Iterator[Pair]:
    """Two processes for one test alone, which does not leave both alive."""
    yield from start_pair(tmp_path, TCP)


def start_pair(folder: Path, tls: str) -> Iterator[Pair]:
    with NixlPeer("owner", folder, tls) as owner, NixlPeer("reader", folder, tls) as reader:
        yield Pair(owner, reader)


over_tcp = pytest.mark.parametrize("agents", [TCP], ids=["tcp"], indirect=True)


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_every_block_is_read_right_before_and_after_defragmentation(pair: Pair, layout: str) -> None:
    pair.build(layout)
    for blocks in STEPS:
        fragmented = pair.commit(blocks)
    assert fragmented["chunks_per_segment"] == len(STEPS)
    pair.owner.ask("fill", seed=1)
    pair.register()
    pair.connect()
    got = pair.read(STEPS[-1], seed=1)
    assert (got["state"], got["differing"]) == ("DONE", [])
    assert got["pages"] == LAYERS * STEPS[-1]
    assert got["descriptors"] > got["pages"], "no block lay across a chunk border"

    pair.disconnect()
    whole = pair.commit(STEPS[-1], defragment=True)
    assert whole["remapped"]
    assert whole["generation"] > fragmented["generation"]
    pair.owner.ask("fill", seed=2)
    registered = pair.register()
    assert len(registered) == len(whole["extents"]) == (LAYERS if layout == "LBNHC" else 1)
    pair.connect()
    got = pair.read(STEPS[-1], seed=2)
    assert (got["state"], got["differing"]) == ("DONE", [])
    assert got["descriptors"] == got["pages"]


def test_writes_of_a_peer_land_before_and_after_defragmentation(pair: Pair) -> None:
    pair.build()
    for blocks in STEPS:
        pair.commit(blocks)
    pair.register()
    pair.connect()
    assert pair.write(STEPS[-1], seed=3) == "DONE"
    assert pair.owner.ask("differing", seed=3) == []

    pair.disconnect()
    pair.commit(STEPS[-1], defragment=True)
    pair.register()
    pair.connect()
    assert pair.write(STEPS[-1], seed=4) == "DONE"
    assert pair.owner.ask("differing", seed=4) == []


def test_a_descriptor_over_two_registrations_fails_cleanly(pair: Pair) -> None:
    pair.build()
    pair.commit(10)
    pair.commit(25)
    pair.owner.ask("fill", seed=1)
    pair.register()
    pair.connect()
    first, second = [extent for extent in pair.extents if extent[3] == 0]
    assert first[0] + first[1] == second[0], "the two chunks adjoin"
    with pytest.raises(ChildError) as refused:
        pair.read_range(second[0] - 512, 1024, checked=False)
    assert refused.value.kind == "nixlNotFoundError"
    assert pair.read(25, seed=1)["differing"] == []


def test_growth_without_a_remap_registers_the_new_chunk_only(pair: Pair) -> None:
    pair.build(**EVEN)
    pair.commit(16)
    pair.owner.ask("fill", seed=1)
    before = pair.register()
    pair.connect()
    assert pair.read(16, seed=1)["differing"] == []

    report = pair.commit(40)
    assert not report["remapped"]
    pair.owner.ask("fill", seed=1, first=16)
    added = pair.register()
    assert len(added) == LAYERS
    assert sum(nbytes for _, nbytes in added) == LAYERS * 24 * pair.page_bytes
    assert len(pair.extents) == len(before) + len(added)
    pair.connect()
    got = pair.read(40, seed=1)
    assert (got["state"], got["differing"]) == ("DONE", [])


def test_I5_registering_the_storage_of_capacity_views_lets_a_peers_read_kill_the_owner(doomed_pair: Pair) -> None:
    doomed_pair.build()
    doomed_pair.commit(10)
    doomed_pair.owner.ask("fill", seed=1)
    doomed_pair.register("views")
    doomed_pair.connect()
    assert doomed_pair.read(10, seed=1)["differing"] == []
    try:
        state = doomed_pair.read_range(doomed_pair.block_address(0, 40), doomed_pair.page_bytes, checked=False)
    except ChildError as error:
        state = str(error)
    assert state != "DONE"
    assert doomed_pair.owner.wait() == -signal.SIGSEGV


@over_tcp
def test_I5_with_extents_the_same_read_is_refused_before_it_is_posted_and_both_live(pair: Pair) -> None:
    pair.build()
    pair.commit(10)
    pair.owner.ask("fill", seed=1)
    pair.register("extents")
    pair.connect()
    uncommitted = pair.block_address(0, 40)
    with pytest.raises(ChildError, match="committed prefix") as refused:
        pair.read_range(uncommitted, pair.page_bytes, checked=True)
    assert refused.value.kind == "ExtentError"
    with pytest.raises(ChildError) as unknown:
        pair.read_range(uncommitted, pair.page_bytes, checked=False)
    assert unknown.value.kind == "nixlNotFoundError", "NIXL knows of nothing that was not registered"
    assert pair.owner.ask("ping") == "owner"
    assert pair.reader.ask("ping") == "reader"
    got = pair.read(10, seed=1)
    assert (got["state"], got["differing"]) == ("DONE", [])


@over_tcp
def test_I5_storages_of_committed_views_are_right_to_register(pair: Pair) -> None:
    pair.build()
    pair.commit(10)
    pair.commit(40, defragment=True)
    pair.owner.ask("fill", seed=1)
    registered = pair.register("committed_views")
    assert sorted(registered) == sorted(extent[:2] for extent in pair.extents)
    pair.connect()
    got = pair.read(40, seed=1)
    assert (got["state"], got["differing"]) == ("DONE", [])
    with pytest.raises(ChildError) as beyond:
        pair.read_range(pair.block_address(0, 40), pair.page_bytes, checked=False)
    assert beyond.value.kind == "nixlNotFoundError"
    assert pair.owner.ask("ping") == "owner"
