"""The driver conformance suite: right drivers pass it, and each wrong one is caught by the rule it breaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import wrong_batches  # noqa: F401 - it registers more of them
import wrong_sharing  # noqa: F401 - as above
from wrong_driver import WRONG, Wrong, caught_by

from pdkv.errors import DriverError, OutOfMemoryError
from pdkv.memory import (
    CountingDriver,
    FailingDriver,
    HostDriver,
    LimitedDriver,
    MappedChunk,
    MemoryDriver,
    MemoryInfo,
    PhysicalChunk,
)
from pdkv.testing import DRIVER_CHECKS, BrokenRuleError, check_driver, run_driver_check

pytestmark = pytest.mark.cpu

KIB, MIB = 1 << 10, 1 << 20

RIGHT: dict[str, Callable[[], MemoryDriver]] = {
    "host of 4 KiB": lambda: HostDriver(4 * KIB),
    "host of 64 KiB": lambda: HostDriver(64 * KIB),
    "host of 2 MiB": lambda: HostDriver(2 * MIB),
    "limited": lambda: LimitedDriver(HostDriver(64 * KIB), 10 * MIB),
    "counting": lambda: CountingDriver(HostDriver(64 * KIB)),
    "failing, but not now": lambda: FailingDriver(HostDriver(64 * KIB)),
    "stacked": lambda: LimitedDriver(FailingDriver(CountingDriver(HostDriver(4 * KIB))), MIB),
}


@pytest.mark.parametrize("rule", DRIVER_CHECKS)
@pytest.mark.parametrize("factory", RIGHT.values(), ids=RIGHT)
def test_driver_keeps_to_the_rule(factory: Callable[[], MemoryDriver], rule: str) -> None:
    run_driver_check(rule, factory)


@caught_by("tells_what_it_is")
class GranuleIsNoPowerOfTwo(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.granule = 3 * 4 * KIB


@caught_by("tells_what_it_is")
class DescribesNothing(Wrong):
    def describe(self) -> dict[str, str | int | bool]:
        return {}


@caught_by("counts_free_and_total_memory")
class MoreFreeThanTotal(Wrong):
    def memory_info(self) -> MemoryInfo:
        info = super().memory_info()
        return MemoryInfo(info.total + 1, info.total)


@caught_by("reserves_more_than_there_is_memory_without_taking_any")
class ReservesOnlyWhatIsFree(Wrong):
    def reserve(self, nbytes: int) -> int:
        if nbytes > self.memory_info().free:
            raise OutOfMemoryError("too much", wanted=nbytes, free=0)
        return super().reserve(nbytes)


@caught_by("reserves_more_than_there_is_memory_without_taking_any")
class BacksWhatItReserves(Wrong):
    def reserve(self, nbytes: int) -> int:
        address = super().reserve(nbytes)
        super().map(address, super().create(self.granule))
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        super().unmap(address, self.granule)
        super().unreserve(address, nbytes)


@caught_by("reserves_ranges_that_are_aligned_and_apart")
class ReservesOffTheGranule(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.granule = 1 << 30  # claims far more than the inner driver aligns to

    def reserve(self, nbytes: int) -> int:
        return super().reserve(nbytes + 4 * KIB) + 4 * KIB

    def unreserve(self, address: int, nbytes: int) -> None:
        super().unreserve(address - 4 * KIB, nbytes + 4 * KIB)


@caught_by("reserves_ranges_that_are_aligned_and_apart")
class ReservesTheSameTwice(Wrong):
    first: int | None = None

    def reserve(self, nbytes: int) -> int:
        if self.first is None:
            self.first = super().reserve(nbytes)
        return self.first


@caught_by("refuses_sizes_that_are_not_whole_granules")
class RoundsSizesUp(Wrong):
    def create(self, nbytes: int) -> PhysicalChunk:
        return super().create(max(-(-nbytes // self.granule), 1) * self.granule)


@caught_by("unreserves_whole_empty_reservations_only")
class UnmapsWhenUnreserving(Wrong):
    def unreserve(self, address: int, nbytes: int) -> None:
        for chunk in self.query_chunks(address, nbytes):
            self.unmap(chunk.address, chunk.nbytes)
        super().unreserve(address, nbytes)


@caught_by("unreserves_whole_empty_reservations_only")
class IgnoresASecondUnreserve(Wrong):
    def unreserve(self, address: int, nbytes: int) -> None:
        try:
            super().unreserve(address, nbytes)
        except DriverError:
            if self.query_chunks(address, nbytes):
                raise


@caught_by("maps_chunks_that_can_be_written_and_read")
class ShowsACopy(Wrong):
    def tensor(self, address: int, nbytes: int, keepalive: object) -> torch.Tensor:
        return super().tensor(address, nbytes, keepalive).clone()


@caught_by("keeps_contents_of_a_chunk_that_moves")
class ZeroesWhenMapping(Wrong):
    def map(self, address: int, chunk: PhysicalChunk) -> None:
        super().map(address, chunk)
        super().zero(address, chunk.nbytes)


@caught_by("maps_only_where_it_is_allowed")
class MapsOverWhatIsThere(Wrong):
    def map(self, address: int, chunk: PhysicalChunk) -> None:
        for old in self.query_chunks(address, chunk.nbytes):
            super().unmap(old.address, old.nbytes)
        super().map(address, chunk)


@caught_by("maps_only_where_it_is_allowed")
class WritesBeforeItRefuses(Wrong):
    def map(self, address: int, chunk: PhysicalChunk) -> None:
        for old in self.query_chunks(address, chunk.nbytes):
            super().zero(old.address, old.nbytes)
        super().map(address, chunk)


@caught_by("unmaps_whole_mappings_only")
class UnmapsMoreThanAskedFor(Wrong):
    def unmap(self, address: int, nbytes: int) -> None:
        for chunk in self.query_chunks(address, nbytes):
            super().unmap(chunk.address, chunk.nbytes)


@caught_by("zeroes_exactly_the_range_across_mappings")
class ZeroesTheFirstMappingOnly(Wrong):
    def zero(self, address: int, nbytes: int) -> None:
        super().zero(address, min(nbytes, self.granule - address % self.granule))


@caught_by("zeroes_exactly_the_range_across_mappings")
class ZeroesWholeGranules(Wrong):
    def zero(self, address: int, nbytes: int) -> None:
        begin = address // self.granule * self.granule
        end = -(-(address + nbytes) // self.granule) * self.granule
        super().zero(begin, end - begin)


@caught_by("copies_exactly_the_range")
class CopiesOneByteLess(Wrong):
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        super().copy(destination, source, nbytes - 1)


@caught_by("copies_exactly_the_range")
class CopiesTheWrongWay(Wrong):
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        super().copy(source, destination, nbytes)


@caught_by("reports_mappings_as_they_are")
class MergesNeighbours(Wrong):
    def query_chunks(self, address: int, nbytes: int) -> tuple[MappedChunk, ...]:
        merged: list[MappedChunk] = []
        for chunk in super().query_chunks(address, nbytes):
            if merged and merged[-1].address + merged[-1].nbytes == chunk.address:
                last = merged.pop()
                chunk = MappedChunk(last.address, last.nbytes + chunk.nbytes, last.ident)
            merged.append(chunk)
        return tuple(merged)


@caught_by("reports_mappings_as_they_are")
class CutsMappingsToTheRange(Wrong):
    def query_chunks(self, address: int, nbytes: int) -> tuple[MappedChunk, ...]:
        cut = []
        for chunk in super().query_chunks(address, nbytes):
            begin, end = max(chunk.address, address), min(chunk.address + chunk.nbytes, address + nbytes)
            cut.append(MappedChunk(begin, end - begin, chunk.ident))
        return tuple(cut)


@caught_by("reports_mappings_as_they_are")
class CallsAllChunksTheSame(Wrong):
    def query_chunks(self, address: int, nbytes: int) -> tuple[MappedChunk, ...]:
        return tuple(MappedChunk(c.address, c.nbytes, 1) for c in super().query_chunks(address, nbytes))


@caught_by("reports_mappings_as_they_are")
class NamesChunksByAddress(Wrong):
    def query_chunks(self, address: int, nbytes: int) -> tuple[MappedChunk, ...]:
        return tuple(MappedChunk(c.address, c.nbytes, c.address) for c in super().query_chunks(address, nbytes))


@caught_by("reports_mappings_as_they_are")
class RemembersWhatItMapped(Wrong):
    """Answers from its own books, which it forgets to change."""

    def __init__(self) -> None:
        super().__init__()
        self.books: list[MappedChunk] = []

    def map(self, address: int, chunk: PhysicalChunk) -> None:
        super().map(address, chunk)
        self.books.append(MappedChunk(address, chunk.nbytes, chunk.handle))

    def query_chunks(self, address: int, nbytes: int) -> tuple[MappedChunk, ...]:
        inside = [c for c in self.books if c.address < address + nbytes and c.address + c.nbytes > address]
        return tuple(sorted(inside, key=lambda chunk: chunk.address))


@caught_by("says_when_memory_is_short_and_goes_on")
class CallsExhaustionSomethingElse(Wrong):
    def create(self, nbytes: int) -> PhysicalChunk:
        try:
            return super().create(nbytes)
        except OutOfMemoryError as error:
            raise DriverError(str(error)) from error


@caught_by("says_when_memory_is_short_and_goes_on")
class ForgetsWhatWasWanted(Wrong):
    def create(self, nbytes: int) -> PhysicalChunk:
        try:
            return super().create(nbytes)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(str(error), wanted=0, free=error.free) from error


@caught_by("says_when_memory_is_short_and_goes_on")
class NeverRunsOut(Wrong):
    def create(self, nbytes: int) -> PhysicalChunk:
        return super().create(min(nbytes, 16 * self.granule))

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(16 * self.granule, 16 * self.granule)


@caught_by("releases_each_chunk_once")
class IgnoresASecondRelease(Wrong):
    def release(self, chunk: PhysicalChunk) -> None:
        try:
            super().release(chunk)
        except DriverError:
            return


class KnowsWhereChunksAre(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, int] = {}

    def map(self, address: int, chunk: PhysicalChunk) -> None:
        super().map(address, chunk)
        self.places[chunk.handle] = address

    def unmap(self, address: int, nbytes: int) -> None:
        super().unmap(address, nbytes)
        self.places = {handle: place for handle, place in self.places.items() if place != address}


@caught_by("keeps_mapped_memory_when_its_chunk_is_released")
class UnmapsWhatItReleases(KnowsWhereChunksAre):
    def release(self, chunk: PhysicalChunk) -> None:
        if chunk.handle in self.places:
            self.unmap(self.places[chunk.handle], chunk.nbytes)
        super().release(chunk)


@caught_by("keeps_mapped_memory_when_its_chunk_is_released")
class RefusesToReleaseWhatIsMapped(KnowsWhereChunksAre):
    def release(self, chunk: PhysicalChunk) -> None:
        if chunk.handle in self.places:
            raise DriverError("still mapped")
        super().release(chunk)


@caught_by("closes_twice_and_gives_back_afterwards")
class ClosesOnce(Wrong):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise DriverError("closed already")
        self.closed = True


@caught_by("closes_twice_and_gives_back_afterwards")
class RefusesEverythingOnceClosed(Wrong):
    closed = False

    def close(self) -> None:
        self.closed = True

    def unmap(self, address: int, nbytes: int) -> None:
        if self.closed:
            raise DriverError("closed")
        super().unmap(address, nbytes)


@pytest.mark.parametrize(("rule", "driver"), WRONG, ids=[driver.__name__ for _, driver in WRONG])
def test_wrong_driver_is_caught_by_the_rule_it_breaks(rule: str, driver: type[Wrong]) -> None:
    with pytest.raises(BrokenRuleError, match=f"^{rule}: "):
        run_driver_check(rule, driver)


def test_every_rule_has_a_wrong_driver_that_breaks_it() -> None:
    assert {rule for rule, _ in WRONG} == set(DRIVER_CHECKS)


def test_check_driver_runs_every_rule_and_names_the_one_that_broke() -> None:
    with pytest.raises(BrokenRuleError, match="copies_exactly_the_range: every byte of the range is copied"):
        check_driver(CopiesOneByteLess)
    check_driver(lambda: HostDriver(4 * KIB))
