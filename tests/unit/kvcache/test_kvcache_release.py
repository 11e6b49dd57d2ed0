"""Letting go of the memory of a cache, and taking it back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvcache_strategies import GRANULE, fill_all, holds

from pdkv.errors import ExtentError, OutOfMemoryError
from pdkv.kvcache import GrowableKVCache, KVCacheConfig
from pdkv.memory import HostDriver
from pdkv.memory.wrappers import FailingDriver, LimitedDriver

pytestmark = pytest.mark.cpu

OpenCache = Callable[..., GrowableKVCache]


def test_released_memory_is_back_and_addresses_stay(cache: GrowableKVCache) -> None:
    cache.commit(20)
    view = cache.views()["b"]
    address = view.data_ptr()
    report = cache.release_physical()
    assert report.released == report.given_back == 3 * 6 * GRANULE
    assert (cache.physical_bytes, cache.num_committed_blocks, cache.is_released) == (0, 0, True)
    assert cache.extents() == ()
    with pytest.raises(ExtentError):
        cache.check_range(address, 1)
    assert cache.views()["b"].data_ptr() == address


def test_recommitting_restores_the_count_zeroed_in_one_chunk_with_a_new_generation(cache: GrowableKVCache) -> None:
    cache.commit(5)
    cache.commit(20)
    fill_all(cache, 8)
    view = cache.committed_views()["b"]
    cache.release_physical()
    report = cache.recommit()
    assert (report.blocks, report.remapped, report.contents_kept, report.generation) == (20, True, False, 1)
    assert cache.chunks_per_segment() == 1
    assert not view.any()


def test_releasing_twice_gives_nothing_more(cache: GrowableKVCache) -> None:
    cache.commit(20)
    cache.release_physical()
    generation = cache.generation
    assert cache.release_physical().released == 0
    assert cache.recommit().blocks == 20
    assert cache.generation == generation


def test_recommitting_fails_cleanly_and_can_be_tried_again(
    small_config: KVCacheConfig, open_cache: OpenCache, driver: HostDriver
) -> None:
    limited = LimitedDriver(driver, 18 * GRANULE)
    cache = open_cache(small_config, limited)
    cache.commit(20)
    cache.release_physical()
    limited.limit = 17 * GRANULE
    with pytest.raises(OutOfMemoryError):
        cache.recommit()
    assert (cache.is_released, cache.physical_bytes) == (True, 0)
    limited.limit = 18 * GRANULE
    assert cache.recommit().blocks == 20


def test_a_release_that_fails_half_way_leaves_no_old_contents_behind(
    small_config: KVCacheConfig, open_cache: OpenCache, driver: HostDriver
) -> None:
    failing = FailingDriver(driver)
    cache = open_cache(small_config, failing)
    cache.commit(20)
    fill_all(cache, 8)
    failing.fail("unmap", 2)
    with pytest.raises(Exception, match="refused"):
        cache.release_physical()
    assert (cache.is_released, cache.extents()) == (True, ())
    assert cache.recommit().blocks == 20
    assert all(holds(cache, block, 0) for block in range(20))
