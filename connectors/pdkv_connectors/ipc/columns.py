"""Pairs of blocks as columns of numbers: what a copy takes, and what is quick to check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from pdkv.transfer.blocks import BlockPair

Ids = npt.NDArray[np.int32]
Numbers = Sequence[int] | npt.NDArray[np.integer[Any]]

FEW = 32
"""Up to so many ids Python's own loops cost less than numpy's calls, each of which takes a microsecond or more."""


class BlockColumns(Sequence[BlockPair]):
    """The pairs ``(group, source[i], destination[i])``; what :meth:`Transport.read` takes soonest.

    Args:
        source, destination: block ids, or ids of units where the two sides have blocks of different sizes; copied, so
            that what is moved is what was checked.
        group: their KV-cache group.
    """

    def __init__(self, source: Numbers, destination: Numbers, group: int = 0) -> None:
        self.source = np.array(source, np.int32)
        self.destination = np.array(destination, np.int32)
        self.group = group
        if self.source.shape != self.destination.shape or self.source.ndim != 1:
            raise ValueError(
                f"{self.source.shape} source and {self.destination.shape} destination blocks make no pairs"
            )
        #: Both once more as lists, where they are FEW at most.
        self.few = (self.source.tolist(), self.destination.tolist()) if len(self.source) <= FEW else None

    def __len__(self) -> int:
        return len(self.source)

    @overload
    def __getitem__(self, index: int) -> BlockPair: ...

    @overload
    def __getitem__(self, index: slice) -> BlockColumns: ...

    def __getitem__(self, index: int | slice) -> BlockPair | BlockColumns:
        if isinstance(index, slice):
            return BlockColumns(self.source[index], self.destination[index], self.group)
        return BlockPair(self.group, int(self.source[index]), int(self.destination[index]))

    def __iter__(self) -> Iterator[BlockPair]:
        return (
            BlockPair(self.group, *pair) for pair in zip(self.source.tolist(), self.destination.tolist(), strict=True)
        )


def columns_of(pairs: Sequence[BlockPair]) -> list[BlockColumns]:
    """The pairs of each group, in order.

    Raises:
        OverflowError: an id does not fit into 32 bits.
    """
    if isinstance(pairs, BlockColumns):
        return [pairs]
    if 0 < len(pairs) <= FEW and min(map(min, pairs)) >= 0 and len({pair[0] for pair in pairs}) == 1:
        group, source, destination = zip(*pairs, strict=True)
        return [BlockColumns(source, destination, group[0])]
    table = np.fromiter(chain.from_iterable(pairs), np.int64, 3 * len(pairs)).reshape(-1, 3)
    if len(table) and (table.max() > np.iinfo(np.int32).max or table.min() < 0):
        raise OverflowError("a block id is no 32-bit number")
    groups = table[:, 0]
    if len(table) and (groups == groups[0]).all():
        return [BlockColumns(table[:, 1], table[:, 2], int(groups[0]))]
    return [
        BlockColumns(table[groups == group, 1], table[groups == group, 2], int(group)) for group in np.unique(groups)
    ]


def are_within(
    columns: Sequence[BlockColumns], groups: int, sources: Sequence[int], destinations: Sequence[int]
) -> bool:
    """Whether every id is there, and no destination occurs twice.

    Args:
        groups: KV-cache groups.
        sources, destinations: for each group, how many ids there are on either side.
    """
    if len(columns) == 1 and len(columns[0]) and columns[0].few:
        return _few_are_within(columns[0].group, *columns[0].few, groups, sources, destinations)
    total = sum(map(len, columns))
    if not total or any(not 0 <= part.group < groups for part in columns):
        return False
    for part in columns:
        # As unsigned numbers negative ids are the largest.
        if int(part.source.view(np.uint32).max()) >= sources[part.group]:
            return False
        if int(part.destination.view(np.uint32).max()) >= destinations[part.group]:
            return False
    if total == 1:
        return True
    if len(columns) > 1 and len(set(destinations)) > 1:
        return _no_destination_twice(columns)
    seen = np.zeros(max(destinations), np.bool_)
    for part in columns:
        seen[part.destination] = True
    return int(np.count_nonzero(seen)) == total


def _few_are_within(
    group: int,
    source: list[int],
    destination: list[int],
    groups: int,
    sources: Sequence[int],
    destinations: Sequence[int],
) -> bool:
    return (
        0 <= group < groups
        and 0 <= min(source) <= max(source) < sources[group]
        and 0 <= min(destination) <= max(destination) < destinations[group]
        and len(set(destination)) == len(destination)
    )


def _no_destination_twice(columns: Sequence[BlockColumns]) -> bool:
    """For groups with units of different sizes, which count in numbers of their own."""
    return all(len(np.unique(part.destination)) == len(part) for part in columns)
