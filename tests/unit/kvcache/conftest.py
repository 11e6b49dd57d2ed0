"""Drivers and caches for the tests of `pdkv.kvcache`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from kvcache_strategies import GRANULE

from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig, KVCacheLayout
from pdkv.memory import HostDriver, MemoryDriver


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver(GRANULE)


@pytest.fixture
def small_config() -> KVCacheConfig:
    """3 layers of 40 blocks of 1152 bytes: no multiple and no divisor of a granule of 4096 bytes."""
    spec = AttentionSpec(num_kv_heads=3, block_size=4, head_size=12, dtype="float32")
    return KVCacheConfig.uniform(("a", "b", "c"), spec, num_blocks=40, layout=KVCacheLayout.LBNHC)


@pytest.fixture
def open_cache(driver: HostDriver) -> Iterator[Callable[..., GrowableKVCache]]:
    """Build caches that are closed when the test ends."""
    with ExitStack() as stack:

        def build(config: KVCacheConfig, over: MemoryDriver | None = None) -> GrowableKVCache:
            return stack.enter_context(GrowableKVCache(config, over or driver))

        yield build


@pytest.fixture
def cache(open_cache: Callable[..., GrowableKVCache], small_config: KVCacheConfig) -> GrowableKVCache:
    return open_cache(small_config)
