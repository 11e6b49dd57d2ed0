"""A start-up on a device of real, limited memory: the estimate before warmup fails, the size measured after it holds.

The device is a host driver with a limit. What stands for the rest of an engine allocates from the same driver: weights,
the transient memory of a step, and memory that the profile run did not meet and warmup does (a workspace, a module, a
communicator's buffers).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdkv.errors import OutOfMemoryError
from pdkv.kvcache import GrowableKVCache, KVCacheConfig, PageSpec
from pdkv.kvcache.sizing import MemoryReading, SizingConstants, committable_blocks, decide_final_blocks
from pdkv.lifecycle import extend
from pdkv.memory import HostDriver, LimitedDriver, MemoryDriver

pytestmark = pytest.mark.cpu

GRANULE = 4096
MIB = 1 << 20
DEVICE_BYTES = 64 * MIB
WEIGHTS, TRANSIENT, AFTER_PROFILING = 8 * MIB, 4 * MIB, 12 * MIB
BLOCK = PageSpec(num_heads=1, num_states=16, content_bytes=256, block_size=16)
CONSTANTS = SizingConstants(margin_floor_bytes=MIB, margin_fraction=0.25)


class Engine:
    """What allocates beside the cache."""

    def __init__(self, driver: MemoryDriver) -> None:
        self.driver = driver
        self.init_free = driver.memory_info().free
        self.kept = [driver.create(WEIGHTS)]

    @contextmanager
    def step(self) -> Iterator[None]:
        chunk = self.driver.create(TRANSIENT)
        yield
        self.driver.release(chunk)

    def warm_up(self) -> None:
        with self.step():
            self.kept.append(self.driver.create(AFTER_PROFILING))

    def close(self) -> None:
        for chunk in self.kept:
            self.driver.release(chunk)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(LimitedDriver(HostDriver(GRANULE), DEVICE_BYTES))
    yield engine
    engine.close()


@pytest.fixture
def cache(engine: Engine) -> Iterator[GrowableKVCache]:
    config = KVCacheConfig.uniform(["a", "b"], BLOCK, DEVICE_BYTES // (2 * BLOCK.page_bytes))
    with GrowableKVCache(config, engine.driver) as cache:
        yield cache


def fixed_estimate(engine: Engine, cache: GrowableKVCache) -> int:
    """Blocks as an engine sizes a fixed cache: 0.92 of the device, less the weights, less the profiled peak."""
    return cache.blocks_within(int(0.92 * DEVICE_BYTES) - WEIGHTS - TRANSIENT)


def test_the_fixed_estimate_leaves_warmup_without_memory(engine: Engine, cache: GrowableKVCache) -> None:
    cache.commit(fixed_estimate(engine, cache))
    with pytest.raises(OutOfMemoryError):
        engine.warm_up()


def test_the_measured_size_starts_and_a_step_runs_afterwards(engine: Engine, cache: GrowableKVCache) -> None:
    def free() -> int:
        return engine.driver.memory_info().free

    cache.commit(
        min(64, committable_blocks(cache, free_memory=free(), activation_peak_bytes=TRANSIENT, constants=CONSTANTS))
    )
    engine.warm_up()
    reading = MemoryReading(
        init_free_memory=engine.init_free,
        free_memory=free(),
        requested_memory=DEVICE_BYTES,
        transient_peak_bytes=TRANSIENT,
    )
    final = decide_final_blocks(cache, reading=reading, constants=CONSTANTS)
    extend(cache, final.blocks)
    with engine.step():
        assert free() >= CONSTANTS.margin_floor_bytes
    assert 64 < cache.num_committed_blocks < fixed_estimate(engine, cache)
    used = cache.physical_bytes + WEIGHTS + AFTER_PROFILING + TRANSIENT
    assert used > 0.95 * (DEVICE_BYTES - CONSTANTS.margin_floor_bytes)
