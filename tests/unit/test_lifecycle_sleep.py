"""`sleep` and `wake`: their order, who may hold a sleep up, and what is left where a step fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lifecycle_doubles import RecordingConnector, TurnedClock

from pdkv.errors import (
    ConfigError,
    ConnectorError,
    DriverError,
    LeasesHeldError,
    OutOfMemoryError,
    StateError,
    TransportError,
)
from pdkv.kvcache import GrowableKVCache, KVCacheConfig, PageSpec
from pdkv.lifecycle import extend, grow_live, sleep, state, wake
from pdkv.memory import HostDriver
from pdkv.memory.wrappers import FailingDriver, LimitedDriver

pytestmark = pytest.mark.cpu

GRANULE = 4096
PAGE = PageSpec(num_heads=2, num_states=4, content_bytes=100, block_size=4)
BLOCKS = 20


def build(driver: object) -> GrowableKVCache:
    cache = GrowableKVCache(KVCacheConfig.uniform(("a", "b"), PAGE, num_blocks=64), driver)  # type: ignore[arg-type]
    cache.commit(BLOCKS, defragment=True)
    return cache


@pytest.fixture
def cache() -> Iterator[GrowableKVCache]:
    with build(HostDriver(GRANULE)) as cache:
        yield cache


@pytest.fixture
def connector(cache: GrowableKVCache) -> RecordingConnector:
    return RecordingConnector(cache)


def test_nothing_is_released_before_it_is_unregistered_and_nothing_accepted_before_it_is_published(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    sleep(cache, connector)
    assert connector.steps == ["refuse", "withdraw", "unregister"]
    assert (state(cache), cache.physical_bytes, connector.accepting) == ("asleep", 0, False)
    connector.steps.clear()
    wake(cache, connector)
    assert connector.steps == ["unregister", "register", "publish", "resume"]
    assert state(cache) == "running"
    assert connector.extents == cache.extents()


def test_I8_the_report_counts_what_the_driver_has_back() -> None:
    driver = LimitedDriver(HostDriver(GRANULE), 100 * GRANULE)
    with build(driver) as cache:
        held, free = cache.physical_bytes, driver.memory_info().free
        report = sleep(cache)
        assert (report.released, report.given_back, report.pinned) == (held, held, 0)
        assert driver.memory_info().free - free == held


def test_I3_I10_waking_zeroes_everything_and_publishes_a_higher_generation(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    addresses = {name: view.data_ptr() for name, view in cache.views().items()}
    for view in cache.committed_views().values():
        view.fill_(7)
    before = cache.generation
    sleep(cache, connector)
    report = wake(cache, connector)
    assert (report.blocks, report.generation) == (BLOCKS, cache.generation)
    assert cache.generation > before
    assert connector.published == [before, cache.generation]
    assert not any(bool(view.any()) for view in cache.committed_views().values())
    assert {name: view.data_ptr() for name, view in cache.views().items()} == addresses


def test_an_engine_without_kv_transfer_sleeps_and_wakes(cache: GrowableKVCache) -> None:
    assert sleep(cache).given_back > 0
    assert wake(cache).blocks == BLOCKS


def test_sleeping_twice_is_refused_by_the_name_of_the_state(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    sleep(cache, connector)
    with pytest.raises(StateError, match=r"sleep: the KV cache is asleep.*wake it first"):
        sleep(cache, connector)


def test_waking_twice_is_refused_by_the_name_of_the_state(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    sleep(cache, connector)
    wake(cache, connector)
    with pytest.raises(StateError, match=r"wake: the KV cache is running"):
        wake(cache, connector)


def test_while_a_sleep_waits_it_cannot_be_asked_to_sleep_wake_extend_or_grow(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    clock, seen = TurnedClock(), []
    connector.held = ["r1"]

    def ask() -> None:
        for call in (lambda: sleep(cache), lambda: wake(cache), lambda: extend(cache, 30)):
            with pytest.raises(StateError, match="is draining"):
                call()
            seen.append(call)
        with pytest.raises(StateError, match="is draining"):
            grow_live(cache, 30, connector)  # type: ignore[arg-type]
        connector.held.clear()

    clock.at.append((1.0, ask))
    sleep(cache, connector, mode="wait", clock=clock)
    assert len(seen) == 3


@pytest.mark.parametrize("what", ["extend", "grow_live"])
def test_a_cache_asleep_does_not_grow(cache: GrowableKVCache, connector: RecordingConnector, what: str) -> None:
    sleep(cache, connector)
    with pytest.raises(StateError, match=f"{what}: the KV cache is asleep"):
        extend(cache, 30) if what == "extend" else grow_live(cache, 30, connector)  # type: ignore[arg-type]


def test_a_cache_that_was_released_by_hand_counts_as_asleep(cache: GrowableKVCache) -> None:
    cache.release_physical()
    with pytest.raises(StateError, match="is asleep"):
        sleep(cache)
    assert wake(cache).blocks == BLOCKS


def test_a_held_lease_refuses_sleep_at_once_lists_the_holders_and_changes_nothing(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    connector.held = ["r1", "r2"]
    clock, extents = TurnedClock(), connector.extents
    with pytest.raises(LeasesHeldError, match=r"2 request\(s\) hold blocks.*r1, r2") as caught:
        sleep(cache, connector, clock=clock)
    assert caught.value.holders == ("r1", "r2")
    assert connector.steps == ["refuse", "resume"]
    assert (state(cache), connector.accepting, connector.extents, clock.now) == ("running", True, extents, 0.0)


def test_waiting_ends_when_the_last_holder_has(cache: GrowableKVCache, connector: RecordingConnector) -> None:
    connector.held = ["r1"]
    clock = TurnedClock()
    clock.at.append((12.0, connector.held.clear))
    sleep(cache, connector, mode="wait", timeout_s=30, clock=clock)
    assert state(cache) == "asleep"
    assert 12.0 <= clock.now < 12.1


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_I12_a_holder_that_never_ends_is_waited_for_no_longer_than_was_said_and_the_engine_runs_on(
    cache: GrowableKVCache, connector: RecordingConnector, mode: str
) -> None:
    connector.held = ["of a peer that crashed"]
    clock = TurnedClock()
    with pytest.raises(LeasesHeldError, match="after 30 s: of a peer that crashed"):
        sleep(cache, connector, mode=mode, timeout_s=30, clock=clock)  # type: ignore[arg-type]
    assert clock.now == pytest.approx(30.0)
    assert (state(cache), connector.accepting) == ("running", True)
    connector.held.clear()
    assert sleep(cache, connector).given_back > 0


def test_aborting_asks_the_connector_to_end_what_holds_blocks(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    connector.held = ["r1"]
    clock = TurnedClock()
    clock.at.append((0.5, connector.held.clear))
    sleep(cache, connector, mode="abort", clock=clock)
    assert connector.steps == ["refuse", "abort", "withdraw", "unregister"]


def test_an_unknown_mode_is_refused_before_anything_happens(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    with pytest.raises(ConfigError, match="refuse, wait, abort"):
        sleep(cache, connector, mode="now")  # type: ignore[arg-type]
    assert connector.steps == []


def test_peers_that_cannot_be_told_do_not_keep_the_engine_awake(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    connector.broken["withdraw"] = TransportError("the peer has crashed")
    report = sleep(cache, connector)
    assert report.peers_told is False
    assert connector.extents == ()
    assert cache.physical_bytes == 0


def test_memory_that_could_not_be_unregistered_is_never_released_and_waking_registers_it_again(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    held = cache.physical_bytes
    connector.broken["unregister"] = TransportError("the agent does not answer")
    with pytest.raises(TransportError):
        sleep(cache, connector)
    assert (state(cache), cache.physical_bytes, connector.accepting) == ("asleep", held, False)
    connector.broken.clear()
    wake(cache, connector)
    assert (state(cache), connector.extents) == ("running", cache.extents())


def test_a_release_that_fails_leaves_the_cache_asleep_and_waking_zeroes_what_was_left() -> None:
    driver = FailingDriver(HostDriver(GRANULE))
    with build(driver) as cache:
        for view in cache.committed_views().values():
            view.fill_(7)
        driver.fail("unmap", 2)
        with pytest.raises(DriverError):
            sleep(cache)
        assert state(cache) == "asleep"
        assert wake(cache).blocks == BLOCKS
        assert not any(bool(view.any()) for view in cache.committed_views().values())


def test_waking_without_memory_says_how_much_is_missing_and_can_be_tried_again() -> None:
    driver = LimitedDriver(HostDriver(GRANULE), 10 * GRANULE)
    with build(driver) as cache:
        connector = RecordingConnector(cache)
        wanted = cache.physical_bytes
        sleep(cache, connector)
        taken = driver.create(4 * GRANULE)
        connector.steps.clear()
        missing = wanted - 6 * GRANULE
        with pytest.raises(OutOfMemoryError, match=f"{missing} bytes are missing; the cache stays asleep") as caught:
            wake(cache, connector)
        assert (caught.value.wanted, caught.value.free) == (wanted, 6 * GRANULE)
        assert (state(cache), connector.steps, cache.physical_bytes) == ("asleep", [], 0)
        driver.release(taken)
        assert wake(cache, connector).blocks == BLOCKS
        assert connector.accepting


def test_a_registration_that_fails_on_waking_gives_the_memory_back_and_can_be_tried_again(
    cache: GrowableKVCache, connector: RecordingConnector
) -> None:
    sleep(cache, connector)
    connector.broken["register"] = ConnectorError("no")
    with pytest.raises(ConnectorError):
        wake(cache, connector)
    assert (state(cache), cache.physical_bytes, connector.accepting) == ("asleep", 0, False)
    connector.broken.clear()
    wake(cache, connector)
    assert (state(cache), connector.accepting) == ("running", True)


def test_the_generation_rises_with_every_sleep(cache: GrowableKVCache, connector: RecordingConnector) -> None:
    for _ in range(5):
        sleep(cache, connector)
        wake(cache, connector)
    assert connector.published == sorted(set(connector.published))
