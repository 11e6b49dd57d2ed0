"""Drivers around drivers: a budget, counts, failures on order."""

from __future__ import annotations

import inspect

import pytest

from pdkv.errors import ConfigError, DriverError, OutOfMemoryError
from pdkv.memory import CountingDriver, FailingDriver, ForwardingDriver, HostDriver, LimitedDriver, MemoryDriver
from pdkv.memory.wrappers import CALL_KINDS, out_of_memory

pytestmark = pytest.mark.cpu

G = 4096


def test_forwarding_covers_every_method_of_the_contract() -> None:
    contract = {name for name, _ in inspect.getmembers(MemoryDriver, inspect.isfunction) if not name.startswith("_")}
    assert contract == CALL_KINDS
    assert contract <= set(vars(ForwardingDriver))


def test_limit_counts_bytes_that_are_held_and_not_those_that_were() -> None:
    driver = LimitedDriver(HostDriver(G), 3 * G)
    first, second = driver.create(G), driver.create(2 * G)
    with pytest.raises(OutOfMemoryError, match=f"{G} wanted, 0 left") as error:
        driver.create(G)
    assert (error.value.wanted, error.value.free) == (G, 0)
    driver.release(first)
    assert driver.memory_info().free == G
    driver.release(driver.create(G))
    driver.release(second)
    assert (driver.used, driver.memory_info().free, driver.memory_info().total) == (0, 3 * G, 3 * G)


def test_limit_does_not_count_what_could_not_be_created_or_released() -> None:
    failing = FailingDriver(HostDriver(G))
    driver = LimitedDriver(failing, 3 * G)
    failing.fail("create")
    with pytest.raises(DriverError):
        driver.create(G)
    chunk = driver.create(G)
    failing.fail("release")
    with pytest.raises(DriverError):
        driver.release(chunk)
    assert driver.used == G
    driver.release(chunk)
    assert driver.used == 0


def test_limit_never_shows_more_than_the_inner_driver_has() -> None:
    inner = LimitedDriver(HostDriver(G), 2 * G)
    driver = LimitedDriver(inner, 100 * G)
    assert driver.memory_info() == inner.memory_info()


def test_negative_limit_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="negative"):
        LimitedDriver(HostDriver(G), -1)


def test_counting_counts_calls_that_fail_too() -> None:
    driver = CountingDriver(HostDriver(G))
    driver.release(driver.create(G))
    with pytest.raises(DriverError):
        driver.create(1)
    assert driver.calls == {"create": 2, "release": 1}


def test_failing_fails_the_nth_call_of_its_kinds_and_so_many_times() -> None:
    counting = CountingDriver(HostDriver(G))
    driver = FailingDriver(counting)
    driver.fail({"create", "reserve"}, nth=2, times=2)
    address = driver.reserve(G)
    driver.memory_info()
    for call in (driver.create, driver.reserve):
        with pytest.raises(DriverError, match=f"{call.__name__} was refused"):
            call(G)
    driver.release(driver.create(G))
    driver.unreserve(address, G)
    assert driver.failures == 2
    assert counting.calls["create"] == 1, "a call that fails never reaches the inner driver"


def test_failing_takes_an_error_to_raise_and_can_relent() -> None:
    driver = FailingDriver(HostDriver(G))
    driver.fail("create", error=out_of_memory)
    with pytest.raises(OutOfMemoryError):
        driver.create(G)
    driver.fail("create")
    driver.relent()
    driver.release(driver.create(G))


@pytest.mark.parametrize(("kinds", "nth", "times"), [("creat", 1, 1), ([], 1, 1), ("create", 0, 1), ("create", 1, 0)])
def test_orders_that_cannot_be_are_a_config_error(kinds: str, nth: int, times: int) -> None:
    with pytest.raises(ConfigError):
        FailingDriver(HostDriver(G)).fail(kinds, nth, times=times)


def test_description_goes_through_all_layers() -> None:
    driver = LimitedDriver(CountingDriver(HostDriver(G)), 5 * G)
    assert driver.describe() == {**HostDriver(G).describe(), "limit": 5 * G}
