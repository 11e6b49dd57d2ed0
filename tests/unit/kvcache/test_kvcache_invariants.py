"""The invariants of the design that the cache answers for, each over many caches."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache_strategies import GRANULE, block_bytes, committed_range, configs, fill, os_mappings

from pdkv.errors import ExtentError
from pdkv.kvcache import GrowableKVCache, KVCacheConfig, find_extent
from pdkv.memory import HostDriver
from pdkv.memory.wrappers import CountingDriver

pytestmark = pytest.mark.cpu

COUNTS = st.lists(st.integers(0, 10), min_size=1, max_size=4)


@contextmanager
def cache_of(config: KVCacheConfig) -> Iterator[GrowableKVCache]:
    with GrowableKVCache(config, HostDriver(GRANULE)) as cache:
        yield cache


def write_all(cache: GrowableKVCache, value: int) -> None:
    for view in cache.views().values():
        for block in range(cache.num_committed_blocks):
            fill(view, block, value)


def values(cache: GrowableKVCache, blocks: range) -> set[int]:
    """Every byte value in these blocks of all layers."""
    return {
        value
        for view in cache.views().values()
        for block in blocks
        for value in block_bytes(view, block).unique().tolist()
    }


@given(configs(), COUNTS)
def test_I1_addresses_never_move(config: KVCacheConfig, counts: list[int]) -> None:
    with cache_of(config) as cache:
        before = {name: view.data_ptr() for name, view in cache.views().items()}
        cache.commit(1)
        steps = [
            *(lambda count=count: cache.commit(count) for count in counts),
            lambda: cache.commit(counts[0], defragment=True),
            lambda: cache.commit(max(counts[-1], 1), shrink=True),
            lambda: cache.commit(10, defragment=True, preserve=True),
            cache.release_physical,
            cache.recommit,
        ]
        for step in steps:
            step()
            assert {name: view.data_ptr() for name, view in cache.views().items()} == before
            if not cache.is_released:
                assert {name: view.data_ptr() for name, view in cache.committed_views().items()} == before


@given(configs(), COUNTS, st.booleans(), st.booleans())
def test_I2_blocks_read_as_zero_when_they_are_first_committed(
    config: KVCacheConfig, counts: list[int], defragment: bool, shrink: bool
) -> None:
    with cache_of(config) as cache:
        for count in counts:
            before = cache.num_committed_blocks
            report = cache.commit(count, defragment=defragment, shrink=shrink)
            first_new = 0 if report.remapped else before
            assert values(cache, range(first_new, cache.num_committed_blocks)) <= {0}
            write_all(cache, 0x5A)


@given(configs(min_blocks=2), st.data())
def test_I2_holds_where_somebody_wrote_past_the_committed_prefix(config: KVCacheConfig, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, config.num_blocks - 1))
    second = data.draw(st.integers(first + 1, config.num_blocks))
    with cache_of(config) as cache:
        cache.commit(first)
        for segment in range(len(cache.segments)):
            begin, nbytes = committed_range(cache, segment)
            room = sum(chunk.nbytes for chunk in cache.chunks(segment))
            cache.raw_tensor()[begin + nbytes - cache.address : begin + room - cache.address] = 0x5A
        cache.commit(second)
        assert values(cache, range(first, second)) == {0}


@given(configs(), COUNTS)
def test_I3_growth_keeps_contents_and_generation(config: KVCacheConfig, counts: list[int]) -> None:
    with cache_of(config) as cache:
        written = 0
        for count in counts:
            report = cache.commit(count)
            assert not report.remapped
            assert cache.generation == 0
            assert values(cache, range(written)) <= {0x33}
            write_all(cache, 0x33)
            written = cache.num_committed_blocks


def remap_by_defragmenting(cache: GrowableKVCache) -> None:
    cache.commit(cache.num_committed_blocks, defragment=True)


def remap_by_shrinking(cache: GrowableKVCache) -> None:
    cache.commit(cache.num_committed_blocks - 1, shrink=True)


def remap_by_releasing(cache: GrowableKVCache) -> None:
    cache.release_physical()
    cache.recommit()


@pytest.mark.parametrize("remap", [remap_by_defragmenting, remap_by_shrinking, remap_by_releasing])
def test_I3_a_remap_discards_contents_zeroes_and_raises_the_generation_by_one(
    cache: GrowableKVCache, remap: object
) -> None:
    cache.commit(5)
    cache.commit(20)
    write_all(cache, 0x77)
    remap(cache)  # type: ignore[operator]
    assert cache.generation == 1
    assert values(cache, range(cache.num_committed_blocks)) == {0}


@given(configs(), st.integers(1, 9), st.integers(1, 9))
def test_I3_preserving_contents_raises_the_generation_all_the_same(
    config: KVCacheConfig, first: int, second: int
) -> None:
    with cache_of(config) as cache:
        cache.commit(first)
        write_all(cache, 0x44)
        kept = min(cache.num_committed_blocks, second)
        report = cache.commit(second, defragment=True, shrink=True, preserve=True)
        assert report.contents_kept
        assert values(cache, range(kept)) == {0x44}
        assert values(cache, range(kept, cache.num_committed_blocks)) <= {0}
        assert cache.generation == report.remapped


@given(configs(), COUNTS, st.integers(1, 9), st.booleans())
def test_I4_a_defragmented_prefix_is_one_chunk_by_the_kernels_books(
    config: KVCacheConfig, counts: list[int], last: int, preserve: bool
) -> None:
    with cache_of(config) as cache:
        for count in counts:
            cache.commit(count)
        cache.commit(last, defragment=True, preserve=preserve)
        inodes = set()
        for segment in range(len(cache.segments)):
            address, nbytes = committed_range(cache, segment)
            (mapping,) = os_mappings(address, nbytes)
            assert mapping.begin <= address
            assert address + nbytes <= mapping.end
            assert mapping.permissions.startswith("rw")
            inodes.add(mapping.inode)
        assert len(inodes) == len(cache.segments)
        assert cache.chunks_per_segment() == 1


def test_I4_a_fragmented_prefix_is_told_by_the_driver_too(cache: GrowableKVCache) -> None:
    for count in (5, 10, 30):
        cache.commit(count)
    assert cache.chunks_per_segment() == len(os_mappings(*committed_range(cache, 0))) == 3


def test_I4_answers_about_chunks_come_from_the_driver(small_config: KVCacheConfig) -> None:
    counting = CountingDriver(HostDriver(GRANULE))
    with GrowableKVCache(small_config, counting) as cache:
        cache.commit(5)
        for ask in (lambda: cache.chunks(0), cache.chunks_per_segment, cache.extents, cache.describe):
            asked = counting.calls["query_chunks"]
            ask()
            assert counting.calls["query_chunks"] > asked


@given(configs(), COUNTS, st.booleans())
def test_I5_extents_are_exactly_the_committed_bytes(config: KVCacheConfig, counts: list[int], defragment: bool) -> None:
    with cache_of(config) as cache:
        for count in counts:
            cache.commit(count, defragment=defragment)
        extents = cache.extents()
        for segment in range(len(cache.segments)):
            address, nbytes = committed_range(cache, segment)
            mine = [extent for extent in extents if extent.segment == segment]
            assert sum(extent.nbytes for extent in mine) == nbytes
            reached = address
            for extent in mine:
                assert extent.address == reached
                reached = extent.end


@given(configs(), st.integers(1, 9))
def test_I5_storages_that_a_connector_would_register_are_committed_to_the_last_byte(
    config: KVCacheConfig, count: int
) -> None:
    with cache_of(config) as cache:
        cache.commit(count, defragment=True)
        extents = cache.extents()
        for view in cache.committed_views().values():
            storage = view.untyped_storage()
            extent = find_extent(extents, storage.data_ptr(), storage.nbytes())
            assert (extent.address, extent.nbytes) == (storage.data_ptr(), storage.nbytes())
        assert cache.check_range(extent.address, extent.nbytes) == extent


@given(configs(), st.integers(1, 8), st.data())
def test_I5_a_range_with_a_byte_outside_the_committed_prefix_is_refused(
    config: KVCacheConfig, count: int, data: st.DataObject
) -> None:
    with cache_of(config) as cache:
        cache.commit(count)
        segment = data.draw(st.integers(0, len(cache.segments) - 1))
        address, nbytes = committed_range(cache, segment)
        back, beyond = data.draw(st.integers(0, nbytes)), data.draw(st.integers(1, 5000))
        with pytest.raises(ExtentError, match=r"outside the committed prefix|crosses"):
            cache.check_range(address + nbytes - back, back + beyond)


@given(configs(), COUNTS, st.data())
def test_I6_no_extent_and_no_part_of_a_split_range_crosses_a_chunk(
    config: KVCacheConfig, counts: list[int], data: st.DataObject
) -> None:
    with cache_of(config) as cache:
        for count in [1, *counts]:
            cache.commit(count)
        segment = data.draw(st.integers(0, len(cache.segments) - 1))
        address, nbytes = committed_range(cache, segment)
        begin = data.draw(st.integers(0, nbytes - 1))
        length = data.draw(st.integers(1, nbytes - begin))
        parts = cache.split_range(address + begin, length)
        assert sum(part.nbytes for part in parts) == length
        chunks = [cache.chunks(segment) for segment in range(len(cache.segments))]
        for part in (*cache.extents(), *parts):
            (mapping,) = os_mappings(part.address, part.nbytes)
            assert mapping.begin <= part.address
            assert part.end <= mapping.end
            chunk = chunks[part.segment][part.chunk]
            home = cache.address + cache.segments[part.segment].offset + chunk.offset
            assert home <= part.address
            assert part.end <= home + chunk.nbytes


@settings(max_examples=10)  # a garbage collection each
@given(configs(), COUNTS)
def test_I9_closing_leaks_no_descriptor_and_no_mapping(config: KVCacheConfig, counts: list[int]) -> None:
    driver = HostDriver(GRANULE)
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    cache = GrowableKVCache(config, driver)
    for count in counts:
        cache.commit(count)
    address, nbytes = cache.address, cache.bytes_reserved
    view = next(iter(cache.views().values()))
    cache.close()
    cache.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert os_mappings(address, nbytes) == []
    assert view.data_ptr() >= address


def test_I9_leaving_the_context_closes(small_config: KVCacheConfig, driver: HostDriver) -> None:
    with GrowableKVCache(small_config, driver) as cache:
        cache.commit(3)
        assert os_mappings(cache.address, cache.bytes_reserved) != []
    assert cache.physical_bytes == 0
    assert os_mappings(cache.address, cache.bytes_reserved) == []
