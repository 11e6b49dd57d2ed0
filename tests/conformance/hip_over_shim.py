"""Run every check of the HIP driver, each call made by hip-python on the shim. Started by `test_hip_over_shim`.

Usage: hip_over_shim.py LIBRARY; prints one JSON line `[check, error or null]` for each check. A process of its own: it
loads the shim under the HIP runtime's name, which no other test may find there.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial

import pytest
from hip import hip

from pdkv.errors import DriverError, DriverUnavailableError, OutOfMemoryError
from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig
from pdkv.memory import Piece, Progress, Reservation, _dlpack
from pdkv.memory.hip import MIN_GRANULE, HipApi, HipDriver
from pdkv.testing import DRIVER_CHECKS, run_driver_check

OLD, NEW = 70_200_000, 71_200_000
NOT_SUPPORTED, UNKNOWN_TO_BINDINGS = 801, 800

shim = ctypes.CDLL(sys.argv[1])
shim.hipShimSetTotal.argtypes = [ctypes.c_size_t]
shim.hipShimLastRefusal.restype = ctypes.c_char_p
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def open_driver(device: int = 1) -> HipDriver:
    """A driver whose memory torch takes for what it is here, the host's."""
    api = HipApi(hip, device)
    api.dlpack_device = (_dlpack.CPU, 0)
    return HipDriver(device, api=api)


def alive() -> list[int]:
    """Reservations, mappings, handles, streams."""
    counts = (ctypes.c_int * 4)()
    shim.hipShimAlive(counts)
    return list(counts)


def fails(call: Callable[[], object], kind: type[Exception], part: str) -> None:
    """The call must raise `kind` with `part` in the message."""
    with pytest.raises(kind, match=re.escape(part)):
        call()


@check
def the_granule_is_at_least_2_mib_though_the_runtime_says_4_kib() -> None:
    driver = open_driver()
    assert driver.granule == MIN_GRANULE == 2 << 20
    driver.close()


@check
def a_runtime_before_7_12_is_refused_chunks_of_several_sizes_with_the_reason() -> None:
    shim.hipShimSetVersion(OLD)
    try:
        driver = open_driver()
        granule = driver.granule
        address = driver.reserve(8 * granule)
        one, two, other = driver.create(granule), driver.create(2 * granule), driver.create(granule)
        driver.map(address, one)
        fails(lambda: driver.map(address + 4 * granule, two), DriverError, "before HIP 7.12 hipMemSetAccess fails")
        driver.map(address + granule, other)
        elsewhere = driver.reserve(2 * granule)
        driver.map(elsewhere, two)
        for place, nbytes in ((address, granule), (address + granule, granule), (elsewhere, 2 * granule)):
            driver.unmap(place, nbytes)
        for chunk in (one, two, other):
            driver.release(chunk)
        driver.unreserve(address, 8 * granule)
        driver.unreserve(elsewhere, 2 * granule)
        reservation = Reservation(driver, 8 * granule)
        mixed = [Piece(0, granule), Piece(2 * granule, 2 * granule)]
        fails(lambda: reservation.add(mixed), DriverError, "before HIP 7.12 hipMemSetAccess fails")
        assert (reservation.chunks(), reservation.physical_bytes) == ((), 0)
        reservation.close()
        driver.close()
    finally:
        shim.hipShimSetVersion(NEW)


@check
def access_is_granted_to_whole_runs_also_when_a_hole_is_closed() -> None:
    driver = open_driver()
    granule = driver.granule
    address = driver.reserve(8 * granule)
    chunks = {offset: driver.create(granules * granule) for offset, granules in {1: 1, 4: 2, 2: 2}.items()}
    for offset, chunk in chunks.items():  # the last one closes the hole; the shim refuses access to a part of a run
        driver.map(address + offset * granule, chunk)
    view = driver.tensor(address + granule, 5 * granule, object())
    view.fill_(3)
    driver.zero(address + granule, 5 * granule)
    assert not view.any()
    for offset, chunk in chunks.items():
        driver.unmap(address + offset * granule, chunk.nbytes)
        driver.release(chunk)
    driver.unreserve(address, 8 * granule)
    driver.close()


@check
def a_refused_access_leaves_nothing_mapped() -> None:
    driver = open_driver()
    address, chunk = driver.reserve(driver.granule), driver.create(driver.granule)
    for error, said in ((NOT_SUPPORTED, "failed with hipErrorNotSupported"), (UNKNOWN_TO_BINDINGS, "failed: 800")):
        shim.hipShimFail(b"hipMemSetAccess", error, 0)
        fails(lambda: driver.map(address, chunk), DriverError, f"hipMemSetAccess {said}")
        assert alive()[1] == 0
        assert driver.query_chunks(address, driver.granule) == ()
    driver.map(address, chunk)
    driver.unmap(address, driver.granule)
    driver.release(chunk)
    driver.unreserve(address, driver.granule)
    driver.close()


@check
def many_ranges_are_backed_in_one_go_and_waited_for_once() -> None:
    driver = open_driver()
    granule, api = driver.granule, driver._api
    address = driver.reserve(16 * granule)
    calls, original = [], api.call

    def recorded(function: str, *arguments: object, **options: int) -> object:
        calls.append(function)
        return original(function, *arguments, **options)

    api.call = recorded  # type: ignore[method-assign]
    progress, ranges = Progress(), [(address + offset * granule, granule) for offset in (0, 1, 4, 8)]
    driver.back(ranges, progress)
    del api.call  # type: ignore[method-assign]
    mapping = ["hipMemMap", "hipMemSetAccess"] * 4
    inside = ["hipMemCreate"] * 4 + mapping + ["hipMemsetD8Async"] * 4 + ["hipStreamSynchronize"]
    assert calls == ["hipGetDevice", "hipSetDevice", *inside, "hipSetDevice"], calls
    for (place, nbytes), chunk in zip(ranges, progress.chunks, strict=True):
        driver.unmap(place, nbytes)
        driver.release(chunk)
    driver.unreserve(address, 16 * granule)
    driver.close()


@check
def whatever_call_of_many_fails_nothing_is_left_of_them_and_they_can_be_tried_again() -> None:
    driver = open_driver()
    granule = driver.granule
    pieces = [Piece(offset * granule, size * granule) for offset, size in ((1, 1), (2, 2), (6, 1), (9, 3))]
    each = ("hipMemCreate", "hipMemMap", "hipMemSetAccess", "hipMemsetD8Async")
    for call, nth in [*itertools.product(each, range(4)), ("hipStreamSynchronize", 0)]:
        reservation = Reservation(driver, 16 * granule)
        reservation.add([Piece(0, granule)])
        reservation.tensor(0, granule).fill_(5)
        before = alive()
        shim.hipShimFail(call.encode(), NOT_SUPPORTED, nth)
        fails(lambda r=reservation: r.add(pieces), DriverError, f"{call} failed with hipErrorNotSupported")
        assert alive() == before, (call, nth, alive(), before)
        assert reservation.pieces == (Piece(0, granule),)
        assert bool((reservation.tensor(0, granule) == 5).all())
        reservation.add(pieces)
        assert not reservation.tensor(granule, 3 * granule).any()
        assert [chunk.nbytes // granule for chunk in reservation.chunks()] == [1, 1, 2, 1, 3]
        reservation.close()
    driver.close()


@check
def memory_that_runs_out_among_many_is_said_to_be_too_little_for_all() -> None:
    driver = open_driver()
    granule = driver.granule
    reservation = Reservation(driver, 16 * granule)
    for call, nth in itertools.product((b"hipMemCreate", b"hipMemMap"), range(3)):
        shim.hipShimFail(call, 2, nth)
        pieces = [Piece(3 * index * granule, 2 * granule) for index in range(3)]
        fails(lambda p=pieces: reservation.add(p), OutOfMemoryError, f"memory is short: {6 * granule} bytes wanted")
        assert reservation.physical_bytes == 0
    reservation.close()
    driver.close()


@check
def more_than_is_free_is_refused_before_it_is_tried() -> None:
    driver = open_driver()
    free, before = driver.memory_info().free, alive()
    reservation = Reservation(driver, 2 * free)
    shim.hipShimFail(b"hipMemCreate", NOT_SUPPORTED, 0)
    pieces = [Piece(0, free), Piece(free, free)]
    fails(lambda: reservation.add(pieces), OutOfMemoryError, f"{2 * free} bytes wanted, {free} free")
    shim.hipShimFail(b"", 0, 0)
    reservation.close()
    assert alive() == before
    driver.close()


@check
def memory_that_runs_out_at_map_is_said_to_have_run_out() -> None:
    driver = open_driver()
    address, chunk = driver.reserve(driver.granule), driver.create(driver.granule)
    shim.hipShimFail(b"hipMemMap", 2, 0)
    fails(lambda: driver.map(address, chunk), OutOfMemoryError, "bytes are free")
    driver.release(chunk)
    driver.unreserve(address, driver.granule)
    driver.close()


@check
def the_callers_device_is_current_again_after_each_call() -> None:
    hip.hipSetDevice(0)
    driver = open_driver(1)
    driver.unreserve(driver.reserve(driver.granule), driver.granule)
    driver.memory_info()
    assert hip.hipGetDevice()[1] == 0
    driver.close()


@check
def a_device_that_is_not_there_is_refused() -> None:
    fails(lambda: HipDriver(7), DriverUnavailableError, "hipErrorInvalidDevice")


@check
def without_exportable_chunks_the_driver_works_and_says_so() -> None:
    shim.hipShimFail(b"hipMemCreate", NOT_SUPPORTED, 0)
    driver = open_driver()
    assert driver.describe()["handle_type"] == "none"
    chunk = driver.create(driver.granule)
    fails(lambda: driver.export_fd(chunk), DriverError, "cannot be exported")
    driver.release(chunk)
    driver.close()


@check
def a_cache_grows_defragments_sleeps_and_wakes() -> None:
    driver = open_driver()
    spec = AttentionSpec(num_kv_heads=8, block_size=16, head_size=128, dtype="bfloat16")
    with GrowableKVCache(KVCacheConfig.uniform(["a", "b", "c"], spec, 256), driver) as cache:
        view = cache.views()["b"]
        for blocks in (10, 70, 130):
            cache.commit(blocks)
            view[:blocks].fill_(2.0)
        assert cache.chunks_per_segment() == 3
        cache.commit(130, defragment=True, preserve=True)
        assert cache.chunks_per_segment() == 1
        assert bool((view[:130] == 2.0).all())
        assert cache.release_physical().pinned == 0
        cache.recommit()
        assert not view[:130].any()
        del view
    driver.close()


def main() -> None:
    shim.hipShimSetTotal(1 << 30)
    contract = {rule: partial(run_driver_check, rule, open_driver) for rule in DRIVER_CHECKS}
    for name, function in {**contract, **CHECKS}.items():
        before = alive()
        try:
            function()
            left = [now - then for now, then in zip(alive(), before, strict=True)]
            assert not any(left), f"left alive: {left} reservations, mappings, handles, streams"
            error = None
        except Exception:
            error = f"{traceback.format_exc()}the shim's last refusal: {shim.hipShimLastRefusal().decode()!r}"
        print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    main()
