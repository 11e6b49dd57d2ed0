"""What a user of the cache sees: counts, reports, states, views, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from kvcache_strategies import GRANULE, fill_all, holds

from pdkv.errors import CapacityError, OutOfMemoryError, StateError
from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig
from pdkv.memory import HostDriver
from pdkv.memory.wrappers import CountingDriver, FailingDriver, LimitedDriver, out_of_memory

pytestmark = pytest.mark.cpu

OpenCache = Callable[..., GrowableKVCache]
CHANGES = ("create", "map", "unmap", "release", "zero", "copy", "reserve")


def test_a_new_cache_reserves_and_commits_nothing(cache: GrowableKVCache) -> None:
    assert (cache.num_committed_blocks, cache.physical_bytes, cache.generation) == (0, 0, 0)
    assert cache.extents() == ()
    assert cache.chunks_per_segment() == 0
    assert cache.bytes_reserved == cache.config.size == 3 * 12 * GRANULE


def test_a_terabyte_of_address_space_costs_no_memory(open_cache: OpenCache) -> None:
    spec = AttentionSpec(num_kv_heads=8, block_size=16, head_size=128, dtype="bfloat16")
    config = KVCacheConfig.uniform([f"layer.{index}" for index in range(32)], spec, num_blocks=1 << 19)
    cache = open_cache(config)
    cache.commit(2)
    assert cache.bytes_reserved == 1 << 40
    assert cache.views()["layer.31"].shape == (1 << 19, 8, 16, 256)
    assert cache.physical_bytes == 32 * 2 * spec.page_bytes


def test_more_than_the_capacity_commits_the_capacity(cache: GrowableKVCache) -> None:
    report = cache.commit(1000)
    assert report.blocks == cache.num_committed_blocks == cache.capacity_blocks == 40
    assert cache.physical_bytes == cache.bytes_reserved


def test_fewer_blocks_without_shrink_change_nothing(cache: GrowableKVCache) -> None:
    cache.commit(20)
    fill_all(cache, 9)
    report = cache.commit(5)
    assert (report.blocks, report.added_blocks, report.remapped, report.contents_kept) == (20, 0, False, True)
    assert holds(cache, 19, 9)


def test_shrinking_to_nothing_gives_all_memory_back(cache: GrowableKVCache) -> None:
    cache.commit(20)
    report = cache.commit(0, shrink=True)
    assert (report.blocks, report.added_blocks, report.physical_bytes) == (0, -20, 0)
    assert cache.commit(3).blocks == 3


def test_committing_takes_exactly_the_memory_that_was_announced(cache: GrowableKVCache) -> None:
    for blocks in (1, 3, 4, 17, 40):
        cache.commit(blocks)
        assert cache.physical_bytes == cache.physical_bytes_for(blocks) == 3 * -(-blocks * 1152 // GRANULE) * GRANULE


def test_growing_from_nothing_with_defragment_makes_one_chunk_per_segment_without_a_remap(
    small_config: KVCacheConfig, open_cache: OpenCache, driver: HostDriver
) -> None:
    counting = CountingDriver(driver)
    cache = open_cache(small_config, counting)
    report = cache.commit(30, defragment=True)
    assert not report.remapped
    assert (counting.calls["create"], counting.calls["unmap"]) == (3, 0)
    assert cache.chunks_per_segment() == 1


def test_a_commit_with_nothing_to_do_asks_the_driver_nothing(
    small_config: KVCacheConfig, open_cache: OpenCache, driver: HostDriver
) -> None:
    counting = CountingDriver(driver)
    cache = open_cache(small_config, counting)
    cache.commit(30, defragment=True)
    before = counting.calls.copy()
    assert not cache.commit(30, defragment=True, shrink=True, preserve=True).remapped
    assert not cache.commit(12, defragment=True).remapped
    assert counting.calls == before


def test_a_commit_asks_once_for_all_segments(
    small_config: KVCacheConfig, open_cache: OpenCache, driver: HostDriver
) -> None:
    counting = CountingDriver(driver)
    cache = open_cache(small_config, counting)
    cache.commit(1)
    assert (counting.calls["back"], counting.calls["zero_all"]) == (1, 1), "the backing, and its zeroing"
    cache.commit(3)
    assert (counting.calls["back"], counting.calls["zero_all"]) == (1, 2), "what is left of the last granules"
    cache.commit(20)
    assert (counting.calls["back"], counting.calls["zero_all"]) == (2, 4), "both"
    cache.commit(20, defragment=True)
    assert (counting.calls["back"], counting.calls["zero_all"]) == (3, 5)


def test_growing_within_the_last_granule_makes_no_chunk_and_needs_no_remap(
    small_config: KVCacheConfig, open_cache: OpenCache, driver: HostDriver
) -> None:
    counting = CountingDriver(driver)
    cache = open_cache(small_config, counting)
    cache.commit(1)
    assert not cache.commit(3, defragment=True).remapped
    assert counting.calls["create"] == 3


def test_defragmenting_after_growth_in_steps_leaves_one_chunk_and_zeroes(cache: GrowableKVCache) -> None:
    for blocks in (5, 10, 20):
        cache.commit(blocks)
    fill_all(cache, 7)
    assert cache.chunks_per_segment() == 3
    report = cache.commit(20, defragment=True)
    assert (report.remapped, report.contents_kept, report.generation) == (True, False, 1)
    assert cache.chunks_per_segment() == 1
    assert holds(cache, 0, 0)


def test_preserving_carries_contents_into_one_chunk(cache: GrowableKVCache) -> None:
    cache.commit(5)
    cache.commit(20)
    fill_all(cache, 7)
    report = cache.commit(35, defragment=True, preserve=True)
    assert (report.remapped, report.contents_kept, report.generation) == (True, True, 1)
    assert cache.chunks_per_segment() == 1
    assert all(holds(cache, block, 7) for block in range(20))
    assert all(holds(cache, block, 0) for block in range(20, 35))


def test_preserving_needs_spare_memory_for_one_segment_only(
    small_config: KVCacheConfig, open_cache: OpenCache, driver: HostDriver
) -> None:
    cache = open_cache(small_config, LimitedDriver(driver, 4 * 12 * GRANULE))
    cache.commit(5)
    cache.commit(40)
    fill_all(cache, 3)
    assert cache.commit(40, defragment=True, preserve=True).contents_kept
    assert holds(cache, 39, 3)


def test_preserving_without_spare_memory_is_refused_and_loses_nothing(
    small_config: KVCacheConfig, open_cache: OpenCache, driver: HostDriver
) -> None:
    cache = open_cache(small_config, LimitedDriver(driver, 4 * 12 * GRANULE - 1))
    cache.commit(5)
    cache.commit(40)
    fill_all(cache, 3)
    with pytest.raises(OutOfMemoryError, match="nothing was changed") as caught:
        cache.commit(40, defragment=True, preserve=True)
    assert (caught.value.wanted, caught.value.free) == (12 * GRANULE, 12 * GRANULE - 1)
    assert (cache.generation, cache.chunks_per_segment()) == (0, 2)
    assert all(holds(cache, block, 3) for block in range(40))


def test_preserving_that_fails_half_way_loses_nothing_and_can_be_tried_again(
    small_config: KVCacheConfig, open_cache: OpenCache, driver: HostDriver
) -> None:
    failing = FailingDriver(driver)
    cache = open_cache(small_config, failing)
    cache.commit(5)
    cache.commit(20)
    fill_all(cache, 3)
    failing.fail("create", 2, error=out_of_memory)
    with pytest.raises(OutOfMemoryError):
        cache.commit(30, defragment=True, preserve=True)
    assert (cache.num_committed_blocks, cache.generation) == (20, 1)
    assert [len(cache.chunks(segment)) for segment in range(3)] == [1, 2, 2]
    assert cache.commit(30, defragment=True, preserve=True).generation == 2
    assert cache.chunks_per_segment() == 1
    assert all(holds(cache, block, 3) for block in range(20))


def test_a_commit_that_fails_names_bytes_and_can_be_tried_again(
    small_config: KVCacheConfig, open_cache: OpenCache, driver: HostDriver
) -> None:
    limited = LimitedDriver(driver, 9 * GRANULE)
    cache = open_cache(small_config, limited)
    cache.commit(5)
    fill_all(cache, 6)
    with pytest.raises(OutOfMemoryError) as caught:
        cache.commit(40)
    assert (caught.value.wanted, caught.value.free) == (30 * GRANULE, 3 * GRANULE)
    assert cache.num_committed_blocks == 5
    assert holds(cache, 4, 6)
    limited.limit = 36 * GRANULE
    assert cache.commit(40).blocks == 40
    assert holds(cache, 4, 6)


def test_a_remap_that_loses_contents_in_failing_raises_the_generation(
    small_config: KVCacheConfig, open_cache: OpenCache, driver: HostDriver
) -> None:
    failing = FailingDriver(driver)
    cache = open_cache(small_config, LimitedDriver(failing, 36 * GRANULE))
    cache.commit(5)
    cache.commit(40)
    fill_all(cache, 6)
    failing.fail("create", 3, error=out_of_memory)
    with pytest.raises(OutOfMemoryError, match="contents were lost"):
        cache.commit(40, defragment=True)
    assert (cache.num_committed_blocks, cache.generation) == (40, 1)
    assert holds(cache, 39, 0)


def test_the_state_tells_what_is_allowed(cache: GrowableKVCache) -> None:
    with pytest.raises(StateError, match="not released"):
        cache.recommit()
    with pytest.raises(StateError, match="commit at least one block first"):
        cache.committed_views()
    cache.commit(3)
    cache.release_physical()
    with pytest.raises(StateError, match=r"call recommit\(\) before commit\(\)"):
        cache.commit(3)
    with pytest.raises(StateError, match=r"released; call recommit\(\) first"):
        cache.committed_config()
    cache.close()
    for use in (lambda: cache.commit(1), cache.views, cache.extents, cache.release_physical, cache.committed_raw):
        with pytest.raises(StateError, match="closed"):
            use()
    assert cache.describe()["bytes_committed"] == 0


def test_a_negative_number_of_blocks_is_refused(cache: GrowableKVCache) -> None:
    with pytest.raises(CapacityError, match="at least 0, not -1"):
        cache.commit(-1)


def test_a_budget_that_holds_no_block_is_refused(cache: GrowableKVCache) -> None:
    assert cache.require_blocks_within(3 * GRANULE) == cache.blocks_within(3 * GRANULE) == 3
    with pytest.raises(CapacityError, match=f"which take {3 * GRANULE} bytes in 3 segments"):
        cache.require_blocks_within(3 * GRANULE - 1)


def test_describe_tells_plain_values(cache: GrowableKVCache) -> None:
    cache.commit(5)
    cache.commit(12)
    told = cache.describe()
    driver = told.pop("driver")
    assert told == {
        "capacity_blocks": 40,
        "committed_blocks": 12,
        "bytes_reserved": 36 * GRANULE,
        "bytes_committed": 12 * GRANULE,
        "segments": 3,
        "chunks_per_segment": 2,
        "generation": 0,
        "released": False,
        "layout": "LBNHC",
        "granule": GRANULE,
    }
    assert driver["driver"] == "host"


def test_planning_a_cache_imports_no_torch() -> None:
    code = """
import sys, pdkv
spec = pdkv.AttentionSpec(8, 16, 128, "bfloat16")
config = pdkv.KVCacheConfig.uniform(["a", "b"], spec, 100).padded(2 << 20)
with pdkv.GrowableKVCache(config, pdkv.open_driver("host")) as cache:
    cache.commit(3, defragment=True)
    cache.extents()
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_cache_and_views_that_are_alive_at_exit_crash_nothing() -> None:
    code = """
import pdkv
spec = pdkv.AttentionSpec(8, 16, 128, "bfloat16")
config = pdkv.KVCacheConfig.uniform(["a", "b"], spec, 100)
kept = pdkv.GrowableKVCache(config, pdkv.open_driver("host"))
kept.commit(3)
closed = pdkv.GrowableKVCache(config, pdkv.open_driver("host"))
closed.commit(3)
views = kept.views(), kept.committed_views(), closed.views()
closed.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
