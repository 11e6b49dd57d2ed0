"""`kv_cache_lent_for_weight_update`: when memory is lent, that it comes back, and when loading must not begin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lifecycle_doubles import RecordingConnector

from pdkv.errors import OutOfMemoryError, StateError
from pdkv.kvcache import GrowableKVCache, KVCacheConfig, PageSpec
from pdkv.lifecycle import kv_cache_lent_for_weight_update, largest_layer_nbytes, sleep, state, wake
from pdkv.memory import HostDriver
from pdkv.memory.wrappers import LimitedDriver

pytestmark = pytest.mark.cpu

GRANULE = 4096
PAGE = PageSpec(num_heads=2, num_states=4, content_bytes=100, block_size=4)
BLOCKS = 20
CACHE_GRANULES = 8  # two layers of 20 blocks of 800 bytes
LAYER = 4 * 1024 * 4  # the largest layer of MODEL, which is 4 granules

MODEL = torch.nn.Sequential(
    torch.nn.Linear(4, 4, bias=False), torch.nn.Sequential(torch.nn.Linear(1024, 4, bias=False))
)


@pytest.fixture
def driver() -> LimitedDriver:
    """Room for the cache, and for no more than 3 granules beside it."""
    return LimitedDriver(HostDriver(GRANULE), (CACHE_GRANULES + 3) * GRANULE)


@pytest.fixture
def cache(driver: LimitedDriver) -> Iterator[GrowableKVCache]:
    with GrowableKVCache(KVCacheConfig.uniform(("a", "b"), PAGE, num_blocks=64), driver) as cache:
        cache.commit(BLOCKS, defragment=True)
        assert cache.physical_bytes == CACHE_GRANULES * GRANULE
        for view in cache.committed_views().values():
            view.fill_(7)
        yield cache


@pytest.fixture
def connector(cache: GrowableKVCache) -> RecordingConnector:
    return RecordingConnector(cache)


def test_the_largest_layer_is_counted_without_its_children() -> None:
    assert largest_layer_nbytes(MODEL) == LAYER
    assert largest_layer_nbytes(torch.nn.BatchNorm1d(8)) == 4 * 8 * 4 + 8  # weight, bias, mean, variance; a counter


def test_where_enough_is_free_nothing_happens_to_the_cache(
    cache: GrowableKVCache, connector: RecordingConnector, driver: LimitedDriver
) -> None:
    driver.limit = 100 * GRANULE
    generation = cache.generation
    with kv_cache_lent_for_weight_update(cache, MODEL, reclaimable=True, fail_if_short=True, connector=connector) as r:
        assert (r.wanted, r.lent) == (2 * LAYER, False)
        assert cache.physical_bytes == CACHE_GRANULES * GRANULE
    assert (cache.generation, connector.steps) == (generation, [])
    assert all(bool((view == 7).all()) for view in cache.committed_views().values())


def test_where_room_is_short_the_cache_is_released_for_the_context_and_published_again_after_it(
    cache: GrowableKVCache, connector: RecordingConnector, driver: LimitedDriver
) -> None:
    generation = cache.generation
    with kv_cache_lent_for_weight_update(cache, MODEL, reclaimable=True, fail_if_short=True, connector=connector) as r:
        assert (r.lent, r.free, r.given_back) == (True, 3 * GRANULE, CACHE_GRANULES * GRANULE)
        assert driver.memory_info().free == (CACHE_GRANULES + 3) * GRANULE
        assert (state(cache), connector.extents) == ("lent", ())
    assert (state(cache), cache.num_committed_blocks) == ("running", BLOCKS)
    assert connector.steps == ["refuse", "withdraw", "unregister", "unregister", "register", "publish", "resume"]
    assert connector.published[-1] == cache.generation > generation
    assert not any(bool(view.any()) for view in cache.committed_views().values())


def test_the_cache_comes_back_when_loading_raises(cache: GrowableKVCache, connector: RecordingConnector) -> None:
    def load() -> None:
        with kv_cache_lent_for_weight_update(cache, MODEL, reclaimable=True, connector=connector):
            raise KeyError("a weight is missing")

    with pytest.raises(KeyError, match="a weight is missing"):
        load()
    assert (state(cache), cache.num_committed_blocks, connector.accepting) == ("running", BLOCKS, True)


@pytest.mark.parametrize("why", ["reclaimable is false", "reclaimable() is false", "a lease is held"])
def test_what_must_be_kept_is_not_lent_and_loading_does_not_begin_where_not_even_a_layer_fits(
    cache: GrowableKVCache, connector: RecordingConnector, why: str
) -> None:
    if why == "a lease is held":
        connector.held = ["r1"]
    reclaimable = {"reclaimable is false": False, "reclaimable() is false": lambda: False, "a lease is held": True}[why]
    context = kv_cache_lent_for_weight_update(
        cache, MODEL, reclaimable=reclaimable, fail_if_short=True, connector=connector
    )
    with pytest.raises(OutOfMemoryError, match=r"no weight was changed.*must be kept") as caught, context:
        pytest.fail("loading began")
    assert (caught.value.wanted, caught.value.free) == (LAYER, 3 * GRANULE)
    assert (state(cache), connector.extents) == ("running", cache.extents())
    assert all(bool((view == 7).all()) for view in cache.committed_views().values())


def test_without_fail_if_short_it_only_warns(cache: GrowableKVCache, caplog: pytest.LogCaptureFixture) -> None:
    with kv_cache_lent_for_weight_update(cache, MODEL, reclaimable=False, fail_if_short=False) as report:
        assert report.lent is False
    assert "it may fail" in caplog.text


def test_room_for_the_largest_layer_but_not_for_more_only_warns(
    cache: GrowableKVCache, driver: LimitedDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.limit += GRANULE
    with kv_cache_lent_for_weight_update(cache, MODEL, reclaimable=False, fail_if_short=True) as report:
        assert report.lent is False
    assert "it may fail" in caplog.text


def test_a_cache_that_would_not_be_room_enough_is_not_released(cache: GrowableKVCache, driver: LimitedDriver) -> None:
    large = torch.nn.Linear(1024, 100, bias=False)
    context = kv_cache_lent_for_weight_update(cache, large, reclaimable=True, fail_if_short=True)
    with pytest.raises(OutOfMemoryError), context:
        pytest.fail("loading began")
    assert all(bool((view == 7).all()) for view in cache.committed_views().values())


def test_weights_that_took_the_caches_room_leave_it_asleep_to_be_woken_later(
    cache: GrowableKVCache, connector: RecordingConnector, driver: LimitedDriver
) -> None:
    taken = []
    context = kv_cache_lent_for_weight_update(cache, MODEL, reclaimable=True, connector=connector)
    with pytest.raises(OutOfMemoryError, match="bytes are missing; the cache stays asleep"), context:
        taken.append(driver.create(8 * GRANULE))
    assert (state(cache), connector.accepting) == ("asleep", False)
    driver.release(taken[0])
    wake(cache, connector)
    assert (state(cache), connector.accepting) == ("running", True)


def test_a_cache_asleep_is_not_lent(cache: GrowableKVCache, connector: RecordingConnector) -> None:
    sleep(cache, connector)
    with (
        pytest.raises(StateError, match="lend: the KV cache is asleep"),
        kv_cache_lent_for_weight_update(cache, MODEL, reclaimable=True),
    ):
        pytest.fail("loading began")


def test_a_cache_that_is_lent_neither_sleeps_nor_wakes_nor_is_lent_again(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    with kv_cache_lent_for_weight_update(cache, MODEL, reclaimable=True, connector=connector):
        with pytest.raises(StateError, match="sleep: the KV cache is lent"):
            sleep(cache, connector)
        with pytest.raises(StateError, match="wake: the KV cache is lent"):
            wake(cache, connector)
        with (
            pytest.raises(StateError, match="lend: the KV cache is lent"),
            kv_cache_lent_for_weight_update(cache, MODEL, reclaimable=True),
        ):
            pytest.fail("loading began")
    assert state(cache) == "running"
