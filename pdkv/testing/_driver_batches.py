"""The rules of :mod:`pdkv.memory.driver` for calls that take many ranges, `back` and `zero_all`."""

from __future__ import annotations

from pdkv.errors import DriverError, OutOfMemoryError
from pdkv.memory.driver import Progress
from pdkv.testing._bench import Bench
from pdkv.testing.rules import allowed, refused, require


def zeroes_many_ranges_in_one_call(bench: Bench) -> None:
    address, granule = bench.reserve(4), bench.granule
    bench.backed(address, 1, fill=1)
    bench.backed(address + granule, 3, fill=1)
    bench.driver.zero_all([(address + 3 * granule + 5, 10), (address + granule - 1, 2), (address, 0)])
    written = bench.view(address, 4).nonzero().flatten()
    require(written.numel() == 4 * granule - 12, "as many bytes are zero as the ranges have")
    for begin, nbytes in ((3 * granule + 5, 10), (granule - 1, 2)):
        seen = bench.view(address, 4)[begin - 1 : begin + nbytes + 1]
        require(not seen[1:-1].any(), "every byte of every range is zero")
        require(int(seen[0]) == 1 and int(seen[-1]) == 1, "no byte beside a range is changed")
    with refused("zero_all with a range that is not mapped", DriverError):
        bench.driver.zero_all([(address, granule), (bench.reserve(1), granule)])


def backs_many_ranges_in_one_call(bench: Bench) -> None:
    near, far, granule = bench.reserve(8), bench.reserve(4), bench.granule
    ranges = [(far + granule, 2), (near + 3 * granule, 1), (near + 4 * granule, 2), (near, 1)]
    progress = Progress()
    bench.back(ranges, progress)
    require(progress.mapped == len(ranges), f"all {len(ranges)} ranges are mapped, not {progress.mapped}")
    sizes = [chunk.nbytes for chunk in progress.chunks]
    require(sizes == [granules * granule for _, granules in ranges], "the chunks are in the order of the ranges")
    _require_mapped(bench, [(near, 8), (far, 4)], ranges)
    for value, (address, granules) in enumerate(ranges, start=1):
        bench.require_filled(address, granules, 0)
        bench.view(address, granules).fill_(value)
    spare = bench.reserve(2)
    for value, ((address, granules), chunk) in enumerate(zip(ranges, progress.chunks, strict=True), start=1):
        bench.unmap(address)
        bench.map(spare, chunk)
        bench.require_filled(spare, granules, value)
        bench.unmap(spare)


def backs_with_chunks_that_are_there_already_and_lets_them_read_zero(bench: Bench) -> None:
    address, granule = bench.reserve(6), bench.granule
    used, waiting = bench.backed(address, 1, fill=9), bench.create(2)
    bench.unmap(address)
    for sizes in ((1, 1), (2, 2), (2,)):
        progress = Progress([waiting, used])
        ranges = [(address + 2 * index * granule, size) for index, size in enumerate(sizes)]
        with refused(f"chunks of 2 and 1 granules for ranges of {sizes}", DriverError):
            bench.back(ranges, progress)
        require(progress.mapped == 0 and progress.chunks == [waiting, used], "chunks that do not fit are not touched")
    progress = Progress([waiting, used])
    ranges = [(address + granule, 2), (address + 3 * granule, 1), (address, 1)]
    bench.back(ranges, progress)
    same = progress.chunks[0] is waiting and progress.chunks[1] is used
    require(same and len(progress.chunks) == 3, "chunks that are there are used, and only what is missing is created")
    for place, granules in ranges:
        bench.require_filled(place, granules, 0)


def says_how_far_it_came_where_it_cannot_back_all(bench: Bench) -> None:
    address, granule = bench.reserve(9), bench.granule
    bench.backed(address + 6 * granule, 2, fill=7)
    total = bench.driver.memory_info().total // granule + 1
    good = [(address, 1), (address + 2 * granule, 2), (address + 5 * granule, 1)]
    for what, bad, error in (
        ("over a mapping", (address + 7 * granule, 1), DriverError),
        ("over another range", (address + 3 * granule, 2), DriverError),
        ("beyond the end of the reservation", (address + 8 * granule, 2), DriverError),
        ("off the granule", (address + 4 * granule + granule // 2, 1), DriverError),
        ("of no bytes", (address + 8 * granule, 0), DriverError),
        ("larger than all memory", (bench.reserve(total), total), OutOfMemoryError),
    ):
        for position in range(len(good) + 1):
            ranges = [*good[:position], bad, *good[position:]]
            progress = Progress()
            with refused(f"back of a range {what}, number {position}", error):
                bench.back(ranges, progress)
            require(progress.mapped <= len(progress.chunks) <= len(ranges), "no more is claimed than was asked for")
            done = ranges[: progress.mapped]
            _require_mapped(bench, [(address, 9)], [*done, (address + 6 * granule, 2)])
            with allowed("what is said to be done can be undone"):
                for place, _ in done:
                    bench.unmap(place)
                for chunk in progress.chunks:
                    bench.release(chunk)
            bench.require_filled(address + 6 * granule, 2, 7)
    bench.back(good, Progress())


def _require_mapped(bench: Bench, places: list[tuple[int, int]], ranges: list[tuple[int, int]]) -> None:
    """The driver reports exactly `ranges` as mappings in `places`; sizes in granules."""
    found = [(chunk.address, chunk.nbytes // bench.granule) for place in places for chunk in bench.query(*place)]
    require(sorted(found) == sorted(ranges), f"exactly what is said to be mapped is: {sorted(ranges)}, not {found}")


BATCH_CHECKS = (
    zeroes_many_ranges_in_one_call,
    backs_many_ranges_in_one_call,
    backs_with_chunks_that_are_there_already_and_lets_them_read_zero,
    says_how_far_it_came_where_it_cannot_back_all,
)
