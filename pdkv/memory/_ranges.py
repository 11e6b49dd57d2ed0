"""Ranges that do not overlap, kept in order: which one holds an address, what is in the way, what is covered."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator


class RangeSet:
    """Disjoint ranges `[start, start + nbytes)`.

    Each change is made of single operations on a list and a dict, so that a change made from within a garbage
    collection, or from a thread that drops the last view of a reservation, finds nothing half done.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (start, nbytes) in order."""
        return iter([(start, self._sizes[start]) for start in self._starts])

    def get(self, start: int) -> int | None:
        """The size of the range that begins at `start`, or None."""
        return self._sizes.get(start)

    def add(self, start: int, nbytes: int) -> None:
        """Add a range that overlaps no other one; the caller has looked."""
        self._sizes[start] = nbytes
        insort(self._starts, start)

    def remove(self, start: int) -> None:
        """Remove the range that begins at `start`. Cheapest in ascending order."""
        self._starts.remove(start)
        del self._sizes[start]

    def overlapping(self, start: int, nbytes: int) -> list[tuple[int, int]]:
        """The (start, nbytes) of every range that shares a byte with the given one, in order."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        # By index, not over a slice that is copied: a cache that grew in small steps has thousands of ranges, and each
        # mapping asks here.
        last = bisect_left(self._starts, start + nbytes)
        found = []
        for index in range(first, last):
            other = self._starts[index]
            if other + self._sizes[other] > start:
                found.append((other, self._sizes[other]))
        return found

    def is_free(self, start: int, nbytes: int) -> bool:
        """Whether no range shares a byte with the given one."""
        index = bisect_left(self._starts, start + nbytes)
        if index == 0:
            return True
        before = self._starts[index - 1]
        return before + self._sizes[before] <= start

    def covered(self, start: int, nbytes: int) -> int:
        """How many bytes from `start` on, `nbytes` at most, are covered without a hole."""
        position = start
        for other, size in self.overlapping(start, nbytes):
            if other > position:
                break
            position = other + size
        return min(position - start, nbytes)
