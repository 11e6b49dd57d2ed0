"""`extend`: the order of a start-up's last steps, and what is left where one of them fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pdkv.errors import CapacityError, ConnectorError, LayoutError, OutOfMemoryError
from pdkv.kvcache import GrowableKVCache, KVCacheConfig, KVCacheLayout, PageSpec
from pdkv.lifecycle import ExtendReport, extend
from pdkv.memory import HostDriver
from pdkv.memory.wrappers import LimitedDriver

pytestmark = pytest.mark.cpu

GRANULE = 4096
PAGE = PageSpec(num_heads=2, num_states=4, content_bytes=100, block_size=4)


class Engine:
    """Supplies the engine's steps and writes down in which order they are asked for."""

    def __init__(self, cache: GrowableKVCache, *, registers_memory: bool = True) -> None:
        self.cache = cache
        self.registers_memory = registers_memory
        self.steps: list[str] = []
        self.broken_step = ""
        self.registered: tuple[Any, ...] = ()

    def step(self, name: str) -> None:
        self.steps.append(f"{name} with {self.cache.num_committed_blocks} blocks")
        if name == self.broken_step:
            raise RuntimeError(f"{name} broke")

    def agree_minimum(self, blocks: int) -> int:
        self.step("agree")
        return blocks - 1

    def rebind(self, views: Mapping[str, Any], config: KVCacheConfig) -> None:
        self.step("rebind")
        self.bound = {name: tuple(view.shape) for name, view in views.items()}

    def __call__(self, config: KVCacheConfig) -> Engine:
        self.step("create")
        self.config = config
        return self

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        self.registered = cache.extents()
        self.step("register")

    def unregister_kv_cache(self) -> None:
        self.registered = ()
        self.step("unregister")


@pytest.fixture
def cache() -> Iterator[GrowableKVCache]:
    config = KVCacheConfig.uniform(("a", "b"), PAGE, num_blocks=100)
    with GrowableKVCache(config, HostDriver(GRANULE)) as cache:
        cache.commit(4)
        yield cache


def extend_with(engine: Engine, blocks: int = 51, **options: Any) -> ExtendReport:
    return extend(engine.cache, blocks, engine, rebind=engine.rebind, agree_minimum=engine.agree_minimum, **options)


def test_ranks_agree_then_the_cache_grows_then_the_engine_rebinds_and_only_then_is_there_a_connector(
    cache: GrowableKVCache,
) -> None:
    engine = Engine(cache)
    report = extend_with(engine)
    assert engine.steps == [
        "agree with 4 blocks",
        "rebind with 50 blocks",
        "create with 50 blocks",
        "register with 50 blocks",
    ]
    assert (report.blocks, report.requested_blocks, report.connector) == (50, 51, engine)
    assert report.connector_created_after_extend


def test_the_engine_and_the_connector_get_exactly_the_committed_blocks(cache: GrowableKVCache) -> None:
    engine = Engine(cache)
    extend_with(engine)
    assert engine.bound == {"a": (50, 2, 4, 100), "b": (50, 2, 4, 100)}
    assert engine.config == cache.committed_config()
    assert [extent.nbytes for extent in engine.registered] == [50 * 800] * 2


def test_the_report_tells_what_was_done_and_how_long_each_step_took(cache: GrowableKVCache) -> None:
    report = extend_with(Engine(cache))
    assert (report.generation, report.remapped) == (cache.generation, True)
    assert report.physical_bytes == cache.physical_bytes_for(50)
    assert list(report.times_s) == ["agree", "commit", "rebind", "create_connector", "register"]


def test_a_connector_that_registers_memory_finds_one_chunk_per_segment(cache: GrowableKVCache) -> None:
    extend_with(Engine(cache))
    assert cache.chunks_per_segment() == 1


def test_a_connector_that_registers_nothing_saves_the_remap(cache: GrowableKVCache) -> None:
    report = extend_with(Engine(cache, registers_memory=False))
    assert (report.remapped, report.generation, cache.chunks_per_segment()) == (False, 0, 2)


def test_warmup_may_have_committed_more_than_there_is_room_for(cache: GrowableKVCache) -> None:
    cache.commit(80)
    assert extend(cache, 30, Engine(cache)).blocks == 30
    assert cache.physical_bytes == cache.physical_bytes_for(30)


def test_more_than_the_capacity_is_the_capacity(cache: GrowableKVCache) -> None:
    assert extend(cache, 5000, Engine(cache)).blocks == 100


def test_an_engine_without_kv_transfer_only_grows(cache: GrowableKVCache) -> None:
    report = extend(cache, 50)
    assert (report.blocks, report.connector, report.connector_created_after_extend) == (50, None, False)


def test_too_few_blocks_are_refused_before_anything_changes(cache: GrowableKVCache) -> None:
    engine = Engine(cache)
    with pytest.raises(CapacityError, match=r"would get 50 blocks .* room for 51.*at least 60"):
        extend_with(engine, minimum_blocks=60)
    assert engine.steps == ["agree with 4 blocks"]
    with pytest.raises(CapacityError, match="at least 1 are needed"):
        extend(cache, 0, engine)
    assert (cache.num_committed_blocks, cache.generation) == (4, 0)


def test_memory_that_is_not_there_leaves_the_blocks_of_warmup_and_no_connector() -> None:
    config = KVCacheConfig.uniform(("a", "b"), PAGE, num_blocks=100)
    with GrowableKVCache(config, LimitedDriver(HostDriver(GRANULE), 8 * GRANULE)) as cache:
        cache.commit(4)
        engine = Engine(cache)
        with pytest.raises(OutOfMemoryError):
            extend_with(engine)
        assert engine.steps == ["agree with 4 blocks"]
        assert cache.num_committed_blocks == 4
        assert extend_with(engine, blocks=11).blocks == 10


@pytest.mark.parametrize("step", ["agree", "rebind", "create"])
def test_a_step_that_fails_is_raised_as_it_is_and_nothing_is_registered(cache: GrowableKVCache, step: str) -> None:
    engine = Engine(cache)
    engine.broken_step = step
    with pytest.raises(RuntimeError, match=f"{step} broke"):
        extend_with(engine)
    assert engine.steps[-1].startswith(step)
    assert engine.registered == ()


def test_a_registration_that_fails_half_way_is_dropped_and_extending_can_be_tried_again(
    cache: GrowableKVCache,
) -> None:
    engine = Engine(cache)
    engine.broken_step = "register"
    with pytest.raises(RuntimeError, match="register broke"):
        extend_with(engine)
    assert engine.steps[-1] == "unregister with 50 blocks"
    assert engine.registered == ()
    engine.broken_step = ""
    assert extend_with(engine).remapped is False
    assert len(engine.registered) == 2


def test_a_second_failure_in_dropping_the_registration_does_not_hide_the_first(cache: GrowableKVCache) -> None:
    class Stubborn(Engine):
        def unregister_kv_cache(self) -> None:
            raise OSError("the agent is gone")

    engine = Stubborn(cache)
    engine.broken_step = "register"
    with pytest.raises(RuntimeError, match="register broke") as caught:
        extend_with(engine)
    assert "the agent is gone" in caught.value.__notes__[0]


def test_a_connector_that_registers_after_all_is_refused(cache: GrowableKVCache) -> None:
    class Sly(Engine):
        def __call__(self, config: KVCacheConfig) -> Engine:
            return Engine(self.cache, registers_memory=True)

    with pytest.raises(ConnectorError, match="registers_memory=True"):
        extend(cache, 50, Sly(cache, registers_memory=False))


def test_a_layout_that_cannot_grow_is_refused_by_name() -> None:
    config = KVCacheConfig.uniform(("a", "b"), PAGE, 100, KVCacheLayout.BHLNC)
    with GrowableKVCache(config, HostDriver(GRANULE)) as cache, pytest.raises(LayoutError, match=r"BHLNC.*LBNHC"):
        extend(cache, 50, Engine(cache))
