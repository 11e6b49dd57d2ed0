"""Drivers with one mistake in the calls that take many ranges, `back` and `zero_all`."""

from __future__ import annotations

from collections.abc import Sequence

from wrong_driver import Wrong, caught_by

from pdkv.errors import DriverError
from pdkv.memory import Progress


@caught_by("zeroes_many_ranges_in_one_call")
class ZeroesTheFirstRangeOnly(Wrong):
    def zero_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        super().zero_all(ranges[:1])


@caught_by("zeroes_many_ranges_in_one_call")
class ZeroesFromTheFirstRangeToTheLast(Wrong):
    def zero_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        begin, end = min(ranges)[0], max(address + nbytes for address, nbytes in ranges)
        self.zero(begin, end - begin)


@caught_by("zeroes_many_ranges_in_one_call")
class PassesOverWhatIsNotMapped(Wrong):
    def zero_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        super().zero_all([(address, nbytes) for address, nbytes in ranges if self.query_chunks(address, nbytes)])


@caught_by("backs_many_ranges_in_one_call")
class MapsInTheOrderOfAddresses(Wrong):
    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        super().back(sorted(ranges), progress)


@caught_by("backs_many_ranges_in_one_call")
class MixesUpChunksOfOneSize(Wrong):
    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        super().back(ranges, progress)
        chunks = progress.chunks
        for index in range(1, len(chunks)):
            if chunks[index].nbytes == chunks[0].nbytes:
                chunks[0], chunks[index] = chunks[index], chunks[0]


@caught_by("backs_many_ranges_in_one_call")
class MapsAndForgetsToCount(Wrong):
    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        super().back(ranges, progress)
        progress.mapped = 0


@caught_by("backs_many_ranges_in_one_call")
class BacksWithOldContents(Wrong):
    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        super().back(ranges, progress)
        self.tensor(*ranges[-1], self).fill_(4)


@caught_by("backs_many_ranges_in_one_call")
class BacksNeighboursByOneChunk(Wrong):
    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        merged: list[tuple[int, int]] = []
        for address, nbytes in ranges:
            if merged and sum(merged[-1]) == address:
                merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
            else:
                merged.append((address, nbytes))
        super().back(merged, progress)


@caught_by("backs_with_chunks_that_are_there_already_and_lets_them_read_zero")
class TakesEveryChunkForFresh(Wrong):
    def zero_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Leaves out what `back` has just mapped."""


@caught_by("backs_with_chunks_that_are_there_already_and_lets_them_read_zero")
class AlwaysCreates(Wrong):
    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        progress.chunks.clear()
        super().back(ranges, progress)


@caught_by("says_how_far_it_came_where_it_cannot_back_all")
class HidesWhatItDid(Wrong):
    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        done = Progress()
        super().back(ranges, done)
        progress.chunks, progress.mapped = done.chunks, done.mapped


@caught_by("says_how_far_it_came_where_it_cannot_back_all")
class ClaimsWhatItTookBack(Wrong):
    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        try:
            super().back(ranges, progress)
        except DriverError:
            for address, nbytes in ranges[: progress.mapped]:
                self.unmap(address, nbytes)
            raise


@caught_by("says_how_far_it_came_where_it_cannot_back_all")
class ReleasesWhatItCreatedAndSaysNothing(Wrong):
    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        try:
            super().back(ranges, progress)
        except DriverError:
            for chunk in progress.chunks:
                self.release(chunk)
            raise


@caught_by("says_how_far_it_came_where_it_cannot_back_all")
class BacksWhatItCanAndIsContent(Wrong):
    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        try:
            super().back(ranges, progress)
        except DriverError:
            return


@caught_by("says_how_far_it_came_where_it_cannot_back_all")
class MapsOverWhatIsThereWhenBacking(Wrong):
    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        for address, nbytes in ranges:
            for old in self.query_chunks(address, nbytes):
                super().unmap(old.address, old.nbytes)
        super().back(ranges, progress)
