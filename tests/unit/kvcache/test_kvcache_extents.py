"""Extents and splitting, over mappings made up for the purpose."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ExtentError
from pdkv.kvcache import Extent, find_extent, split_at_extents
from pdkv.kvcache.extents import segment_extents
from pdkv.memory.driver import MappedChunk

pytestmark = pytest.mark.cpu

BASE = 1 << 20


@st.composite
def chunked(draw: st.DrawFn) -> tuple[list[MappedChunk], int]:
    """Chunks without gaps from BASE on, and a committed prefix that ends anywhere within them."""
    sizes = draw(st.lists(st.integers(1, 5).map(lambda granules: granules * 16), min_size=1, max_size=6))
    chunks, address = [], BASE
    for ident, nbytes in enumerate(sizes):
        chunks.append(MappedChunk(address, nbytes, ident))
        address += nbytes
    return chunks, draw(st.integers(0, sum(sizes)))


def extents_of(chunks: list[MappedChunk], nbytes: int) -> tuple[Extent, ...]:
    return segment_extents(chunks, BASE, nbytes, segment=3, device_id=7)


@given(chunked())
def test_extents_are_the_committed_bytes_and_each_lies_in_one_chunk(case: tuple[list[MappedChunk], int]) -> None:
    chunks, nbytes = case
    extents = extents_of(chunks, nbytes)
    assert [byte for extent in extents for byte in range(extent.address, extent.end)] == [
        BASE + byte for byte in range(nbytes)
    ]
    for extent in extents:
        chunk = chunks[extent.chunk]
        assert chunk.address <= extent.address
        assert extent.end <= chunk.address + chunk.nbytes
        assert (extent.segment, extent.device_id) == (3, 7)


@given(chunked(), st.integers(-20, 500), st.integers(-1, 500))
def test_splitting_covers_a_committed_range_without_crossing_and_refuses_any_other(
    case: tuple[list[MappedChunk], int], begin: int, nbytes: int
) -> None:
    chunks, committed = case
    extents = extents_of(chunks, committed)
    if nbytes <= 0 or begin < 0 or begin + nbytes > committed:
        with pytest.raises(ExtentError):
            split_at_extents(extents, BASE + begin, nbytes)
        with pytest.raises(ExtentError):
            find_extent(extents, BASE + begin, nbytes)
        return
    parts = split_at_extents(tuple(reversed(extents)), BASE + begin, nbytes)
    assert parts[0].address == BASE + begin
    assert parts[-1].end == BASE + begin + nbytes
    assert all(before.end == after.address for before, after in itertools.pairwise(parts))
    for part in parts:
        assert find_extent(extents, part.address, part.nbytes).chunk == part.chunk


def test_a_hole_between_extents_is_no_way_through() -> None:
    around = [Extent(BASE, 16, 0, 0, 0), Extent(BASE + 32, 16, 0, 0, 1)]
    with pytest.raises(ExtentError, match="16 bytes outside the committed prefix"):
        split_at_extents(around, BASE, 48)


def test_the_message_tells_a_border_from_missing_memory() -> None:
    chunks = [MappedChunk(BASE, 16, 1), MappedChunk(BASE + 16, 16, 2)]
    with pytest.raises(ExtentError, match=r"crosses 1 chunk border.*defragment=True"):
        find_extent(extents_of(chunks, 32), BASE + 8, 16)
    with pytest.raises(ExtentError, match="4 bytes outside the committed prefix"):
        find_extent(extents_of(chunks, 28), BASE + 16, 16)
    with pytest.raises(ExtentError, match="empty"):
        find_extent(extents_of(chunks, 32), BASE, 0)


def test_a_range_that_equals_an_extent_is_found() -> None:
    chunks = [MappedChunk(BASE, 16, 1), MappedChunk(BASE + 16, 16, 2)]
    assert find_extent(extents_of(chunks, 32), BASE + 16, 16) == Extent(BASE + 16, 16, 7, 3, 1)
