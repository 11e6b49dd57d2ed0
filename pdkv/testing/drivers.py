"""The memory driver contract in executable form: one check for each rule of :mod:`pdkv.memory.driver`.

A driver of your own::

    pdkv.testing.check_driver(lambda: MyDriver(device=0))

or, rule by rule under pytest::

    @pytest.mark.parametrize("rule", pdkv.testing.DRIVER_CHECKS)
    def test_contract(rule):
        pdkv.testing.run_driver_check(rule, lambda: MyDriver(device=0))

The suite reads and writes memory only through the driver's own tensors, so it is the same for every device. It needs a
few dozen granules of free memory and leaves nothing behind when the driver is right.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from pdkv.errors import DriverError, OutOfMemoryError
from pdkv.memory.driver import MappedChunk, MemoryDriver, PhysicalChunk
from pdkv.testing._bench import Bench
from pdkv.testing._driver_batches import BATCH_CHECKS
from pdkv.testing._driver_sharing import SHARING_CHECKS
from pdkv.testing.rules import BrokenRuleError, allowed, refused, require

DriverFactory = Callable[[], MemoryDriver]

DRIVER_CHECKS: dict[str, Callable[[Bench], None]] = {}
"""All checks by the name of their rule, in the order in which :func:`check_driver` runs them."""


def check_driver(factory: DriverFactory) -> None:
    """Hold a driver to the whole contract.

    Args:
        factory: opens a fresh driver; called once for each rule.

    Raises:
        BrokenRuleError: the first rule that is broken, by name, and what was seen.
    """
    for rule in DRIVER_CHECKS:
        run_driver_check(rule, factory)


def run_driver_check(rule: str, factory: DriverFactory) -> None:
    """Hold a driver to one rule, a key of :data:`DRIVER_CHECKS`."""
    driver = factory()
    try:
        with allowed("an allowed call"):
            try:
                with Bench(driver) as bench:
                    DRIVER_CHECKS[rule](bench)
            finally:
                driver.close()
    except BrokenRuleError as error:
        raise BrokenRuleError(f"{rule}: {error}") from error


def _check(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
    DRIVER_CHECKS[function.__name__] = function
    return function


@_check
def tells_what_it_is(bench: Bench) -> None:
    driver, granule = bench.driver, bench.driver.granule
    require(granule > 0 and granule & (granule - 1) == 0, f"the granule must be a power of two, not {granule}")
    require(driver.name and driver.device_id >= 0, "a driver has a name and a device number of at least 0")
    described = driver.describe()
    require(described.get("driver") == driver.name, "describe() gives the name under 'driver'")
    require(described.get("granule") == granule, "describe() gives the granule under 'granule'")


@_check
def counts_free_and_total_memory(bench: Bench) -> None:
    info = bench.driver.memory_info()
    require(0 <= info.free <= info.total, f"free memory lies between 0 and total, not {info}")
    require(info.total > 0, "total memory is not 0")


@_check
def reserves_more_than_there_is_memory_without_taking_any(bench: Bench) -> None:
    granules = 2 * bench.driver.memory_info().total // bench.granule + 1
    address = bench.reserve(granules)
    require(not bench.query(address, granules), "nothing is mapped in a fresh reservation")


@_check
def reserves_ranges_that_are_aligned_and_apart(bench: Bench) -> None:
    addresses = sorted(bench.reserve(3) for _ in range(4))
    require(all(address % bench.granule == 0 for address in addresses), "a reservation is aligned to the granule")
    gaps = [right - left for left, right in pairwise(addresses)]
    require(min(gaps) >= 3 * bench.granule, "reservations do not overlap")


@_check
def refuses_sizes_that_are_not_whole_granules(bench: Bench) -> None:
    for nbytes in (0, -bench.granule, bench.granule + 1, bench.granule // 2):
        with refused(f"reserve({nbytes})", DriverError):
            bench.driver.reserve(nbytes)
        with refused(f"create({nbytes})", DriverError):
            bench.driver.create(nbytes)


@_check
def unreserves_whole_empty_reservations_only(bench: Bench) -> None:
    address = bench.reserve(4)
    bench.backed(address, 1, fill=3)
    with refused("unreserve with a chunk mapped", DriverError):
        bench.driver.unreserve(address, 4 * bench.granule)
    bench.require_filled(address, 1, 3)
    bench.unmap(address)
    with refused("unreserve of a part", DriverError):
        bench.driver.unreserve(address, 2 * bench.granule)
    with refused("unreserve of an address inside", DriverError):
        bench.driver.unreserve(address + bench.granule, 3 * bench.granule)
    bench.unreserve(address)
    with refused("unreserve a second time", DriverError):
        bench.driver.unreserve(address, 4 * bench.granule)


@_check
def maps_chunks_that_can_be_written_and_read(bench: Bench) -> None:
    address = bench.reserve(4)
    bench.backed(address + bench.granule, 2, fill=5)
    bench.require_filled(address + bench.granule, 2, 5)


@_check
def keeps_contents_of_a_chunk_that_moves(bench: Bench) -> None:
    address = bench.reserve(4)
    chunk = bench.backed(address, 1, fill=9)
    bench.unmap(address)
    bench.map(address + 2 * bench.granule, chunk)
    bench.require_filled(address + 2 * bench.granule, 1, 9)


@_check
def maps_only_where_it_is_allowed(bench: Bench) -> None:
    address, granule = bench.reserve(4), bench.granule
    bench.backed(address + granule, 2, fill=7)
    chunk = bench.create(2)
    for what, place in (
        ("over the start of a mapping", address),
        ("over the end of a mapping", address + 2 * granule),
        ("over a whole mapping", address + granule),
        ("beyond the end of the reservation", address + 3 * granule),
        ("at an address off the granule", address + granule // 2),
    ):
        with refused(f"map {what}", DriverError):
            bench.driver.map(place, chunk)
    bench.require_filled(address + granule, 2, 7)
    require(len(bench.query(address, 4)) == 1, "a refused map changes nothing")


@_check
def unmaps_whole_mappings_only(bench: Bench) -> None:
    address, granule = bench.reserve(4), bench.granule
    bench.backed(address, 2, fill=4)
    for what, place, nbytes in (
        ("the first half", address, granule),
        ("the second half", address + granule, granule),
        ("more than was mapped", address, 3 * granule),
        ("what is not mapped", address + 2 * granule, granule),
    ):
        with refused(f"unmap {what}", DriverError):
            bench.driver.unmap(place, nbytes)
    bench.require_filled(address, 2, 4)


@_check
def zeroes_exactly_the_range_across_mappings(bench: Bench) -> None:
    address, granule = bench.reserve(3), bench.granule
    bench.backed(address, 1, fill=1)
    bench.backed(address + granule, 2, fill=1)
    begin, end = granule // 2 + 1, 2 * granule + granule // 2 - 1
    bench.driver.zero(address + begin, end - begin)
    seen = bench.view(address, 3)
    require(bool((seen[begin:end] == 0).all()), "every byte of the range is zero, in each mapping")
    require(bool((seen[:begin] == 1).all()) and bool((seen[end:] == 1).all()), "no byte beside the range is changed")
    with refused("zero of a range that is not mapped", DriverError):
        bench.driver.zero(bench.reserve(1), granule)


for _batch_check in BATCH_CHECKS:
    _check(_batch_check)


@_check
def copies_exactly_the_range(bench: Bench) -> None:
    address, granule = bench.reserve(4), bench.granule
    bench.backed(address, 1, fill=2)
    bench.backed(address + 2 * granule, 1, fill=6)
    bench.driver.copy(address + 2 * granule + 1, address, granule - 2)
    seen = bench.view(address + 2 * granule, 1)
    require(bool((seen[1:-1] == 2).all()), "every byte of the range is copied")
    require(int(seen[0]) == 6 and int(seen[-1]) == 6, "no byte beside the range is changed")
    bench.require_filled(address, 1, 2)


@_check
def reports_mappings_as_they_are(bench: Bench) -> None:
    address, granule = bench.reserve(8), bench.granule
    first, second = bench.backed(address, 1), bench.backed(address + granule, 3)
    bench.backed(address + 5 * granule, 2)
    seen = [(found.address - address, found.nbytes) for found in bench.query(address, 8)]
    expected = [(0, granule), (granule, 3 * granule), (5 * granule, 2 * granule)]
    require(seen == expected, f"each mapping is reported once, whole and in order: {expected}, not {seen}")
    inside = bench.query(address + 2 * granule, 1)
    require([found.nbytes for found in inside] == [3 * granule], "a mapping that overlaps the range is reported whole")
    require(not bench.query(address + 4 * granule, 1), "nothing is reported for a hole")
    bench.unmap(address)
    require(len(bench.query(address, 8)) == 2, "what was unmapped is not reported any more")
    _require_idents(bench, address, first, second)


def _require_idents(bench: Bench, address: int, first: PhysicalChunk, second: PhysicalChunk) -> None:
    idents = [found.ident for found in bench.query(address, 8)]
    require(len(set(idents)) == len(idents), "different chunks have different idents")
    bench.unmap(address + bench.granule)
    bench.map(address + 2 * bench.granule, second)
    bench.map(address, first)
    moved: dict[int, MappedChunk] = {found.address: found for found in bench.query(address, 8)}
    require(moved[address + 2 * bench.granule].ident == idents[0], "a chunk keeps its ident where it is mapped again")
    require(moved[address].ident not in idents, "an ident tells one chunk from all others")


@_check
def says_when_memory_is_short_and_goes_on(bench: Bench) -> None:
    wanted = (bench.driver.memory_info().total // bench.granule + 1) * bench.granule
    address = bench.reserve(wanted // bench.granule)
    chunk = None
    try:
        chunk = bench.driver.create(wanted)
        bench.driver.map(address, chunk)
    except OutOfMemoryError as error:
        require(error.wanted == wanted, f"the error gives the bytes wanted: {wanted}, not {error.wanted}")
        require(0 <= error.free < wanted, f"the error gives the bytes free, fewer than wanted, not {error.free}")
    except DriverError as error:
        raise BrokenRuleError(f"exhaustion is an OutOfMemoryError, not {type(error).__name__}: {error}") from error
    else:
        raise BrokenRuleError("more memory than there is in all must be refused, at create or at map")
    finally:
        if chunk is not None:
            bench.driver.release(chunk)
    require(not bench.query(address, wanted // bench.granule), "nothing stays mapped")
    bench.backed(address, 1, fill=8)
    bench.require_filled(address, 1, 8)


@_check
def releases_each_chunk_once(bench: Bench) -> None:
    chunk = bench.create(1)
    bench.release(chunk)
    with refused("release a second time", DriverError):
        bench.driver.release(chunk)
    with refused("map of a released chunk", DriverError):
        bench.driver.map(bench.reserve(1), chunk)


@_check
def keeps_mapped_memory_when_its_chunk_is_released(bench: Bench) -> None:
    address = bench.reserve(2)
    chunk = bench.backed(address, 2, fill=6)
    bench.release(chunk)
    require(len(bench.query(address, 2)) == 1, "a mapping stays when its chunk is released")
    bench.require_filled(address, 2, 6)
    bench.unmap(address)
    require(not bench.query(address, 2), "unmapping it afterwards works as ever")


for _sharing_check in SHARING_CHECKS:
    _check(_sharing_check)


@_check
def closes_twice_and_gives_back_afterwards(bench: Bench) -> None:
    address = bench.reserve(2)
    chunk = bench.backed(address, 1)
    bench.driver.synchronize()
    bench.driver.close()
    bench.driver.close()
    with allowed("unmap, release and unreserve work after close"):
        bench.unmap(address)
        bench.release(chunk)
        bench.unreserve(address)
