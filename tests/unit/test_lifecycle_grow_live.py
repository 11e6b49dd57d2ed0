"""`grow_live`: more blocks under a running engine, with everything kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.errors import CapacityError, ConnectorError, OutOfMemoryError
from pdkv.kvcache import GrowableKVCache, KVCacheConfig, PageSpec
from pdkv.lifecycle import grow_live
from pdkv.memory import HostDriver
from pdkv.memory.wrappers import LimitedDriver

pytestmark = pytest.mark.cpu

GRANULE = 4096
PAGE = PageSpec(num_heads=2, num_states=4, content_bytes=100, block_size=4)
LAYERS = ["a", "b", "c"]


class Connector:
    """Writes down what is asked of it, and which extents it had to register."""

    registers_memory = True

    def __init__(self, *, broken_step: str = "") -> None:
        self.steps: list[str] = []
        self.broken_step = broken_step
        self.extents: tuple[Any, ...] = ()
        self.published: list[int] = []

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name == self.broken_step:
            raise TimeoutError(f"{name} took too long")

    def pause_transfers(self, timeout_s: float) -> None:
        self._step("pause")

    def unregister_kv_cache(self) -> None:
        self._step("unregister")
        self.extents = ()

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        self._step("register")
        self.extents = cache.extents()

    def publish(self, generation: int) -> None:
        self._step("publish")
        self.published.append(generation)

    def resume_transfers(self) -> None:
        self._step("resume")


def build(driver: Any, num_blocks: int = 64) -> GrowableKVCache:
    return GrowableKVCache(KVCacheConfig.uniform(LAYERS, PAGE, num_blocks), driver)


def fill(cache: GrowableKVCache) -> None:
    """Every byte of every committed block gets a value of its own kind."""
    for number, view in enumerate(cache.committed_views().values()):
        for block in range(view.shape[0]):
            view[block].fill_((7 * block + 31 * number) % 101 + 1)


def holds(cache: GrowableKVCache, blocks: int) -> bool:
    """Whether the first blocks hold what :func:`fill` wrote."""
    return all(
        bool((view[block] == (7 * block + 31 * number) % 101 + 1).all())
        for number, view in enumerate(cache.committed_views().values())
        for block in range(blocks)
    )


@pytest.fixture
def cache() -> Iterator[GrowableKVCache]:
    with build(HostDriver(granule=GRANULE)) as cache:
        cache.commit(20, defragment=True)
        fill(cache)
        yield cache


def test_transfers_stop_first_and_start_last(cache: GrowableKVCache) -> None:
    connector = Connector()

    def rebind(views: Mapping[str, Any], config: KVCacheConfig) -> None:
        connector.steps.append(f"rebind {config.num_blocks}")

    grow_live(cache, 60, connector, rebind=rebind)
    assert connector.steps == ["pause", "unregister", "rebind 60", "register", "publish", "resume"]


def test_contents_and_addresses_stay_and_new_blocks_are_zero(cache: GrowableKVCache) -> None:
    before = {name: view.data_ptr() for name, view in cache.views().items()}
    report = grow_live(cache, 60, Connector())
    assert (report.blocks, report.added_blocks, report.moved) == (60, 40, True)
    assert holds(cache, 20)
    assert not any(bool(view[20:].any()) for view in cache.committed_views().values())
    assert {name: view.data_ptr() for name, view in cache.views().items()} == before


def test_I4_I5_the_connector_registers_one_chunk_per_segment_and_publishes_its_generation(
    cache: GrowableKVCache,
) -> None:
    connector, generation = Connector(), cache.generation
    grow_live(cache, 60, connector)
    assert [extent.segment for extent in connector.extents] == [0, 1, 2]
    assert connector.published == [cache.generation]
    assert cache.generation > generation


@given(steps=st.lists(st.integers(1, 64), min_size=1, max_size=5))
@settings(max_examples=25)
def test_contents_survive_any_sequence_of_growths(steps: list[int]) -> None:
    with build(HostDriver(granule=GRANULE)) as cache:
        cache.commit(1)
        for blocks in sorted(steps):
            fill(cache)
            kept = cache.num_committed_blocks
            grow_live(cache, blocks, Connector())
            assert holds(cache, kept)
            assert cache.chunks_per_segment() == 1


def test_transfers_that_do_not_end_leave_all_as_it_was(cache: GrowableKVCache) -> None:
    connector = Connector(broken_step="pause")
    with pytest.raises(TimeoutError):
        grow_live(cache, 60, connector)
    assert connector.steps == ["pause"]
    assert cache.num_committed_blocks == 20
    assert holds(cache, 20)


def test_without_spare_memory_the_old_blocks_are_served_again_and_nothing_is_lost() -> None:
    with build(LimitedDriver(HostDriver(granule=GRANULE), 14 * GRANULE)) as cache:
        cache.commit(20, defragment=True)
        fill(cache)
        connector, generation = Connector(), cache.generation
        with pytest.raises(OutOfMemoryError):
            grow_live(cache, 60, connector)
        assert connector.steps == ["pause", "unregister", "register", "publish", "resume"]
        assert (cache.num_committed_blocks, cache.generation) == (20, generation)
        assert len(connector.extents) == 3
        assert holds(cache, 20)


def test_a_registration_that_fails_keeps_peers_away(cache: GrowableKVCache) -> None:
    connector = Connector(broken_step="register")
    with pytest.raises(TimeoutError):
        grow_live(cache, 60, connector)
    assert "resume" not in connector.steps
    assert connector.published == []
    assert holds(cache, 20)


def test_a_live_cache_does_not_shrink(cache: GrowableKVCache) -> None:
    connector = Connector()
    with pytest.raises(CapacityError, match="cannot shrink to 19"):
        grow_live(cache, 19, connector)
    assert connector.steps == []


def test_a_connector_that_registers_nothing_is_told_that_commit_is_enough(cache: GrowableKVCache) -> None:
    connector = Connector()
    connector.registers_memory = False
    with pytest.raises(ConnectorError, match="commit"):
        grow_live(cache, 60, connector)
