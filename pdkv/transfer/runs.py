"""Pairs of blocks as the fewest copies: runs of bytes that are contiguous on both sides and cross no extent (I6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pdkv.errors import ExtentError
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.fit import paired_runs
from pdkv.transfer.geometry import CacheGeometry, ExtentRun, LayerRun

Array = npt.NDArray[np.int64]

FEW = 64
"""Up to so many pairs are looked at one by one, to find whether they are planned already."""


@dataclass(frozen=True, slots=True)
class Copies:
    """``nbytes[i]`` bytes from ``source[i]`` to ``destination[i]``, by destination; offsets from each cache's base.

    Three int64 arrays of one length.
    """

    source: Array
    destination: Array
    nbytes: Array

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_nbytes(self) -> int:
        """Bytes of all copies."""
        return int(self.nbytes.sum())

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """``(source, destination, nbytes)`` of each."""
        return zip(self.source.tolist(), self.destination.tolist(), self.nbytes.tolist(), strict=True)


def copies_for(source: CacheGeometry, destination: CacheGeometry, pairs: Sequence[BlockPair]) -> Copies:
    """What to copy for `pairs`: all layers of each, bytes as they are, neighbours on both sides merged.

    The two caches hold the same bytes (:func:`pdkv.transfer.fit.require_same_bytes`) and the pairs were checked
    (:func:`pdkv.transfer.checks.require_pairs`).

    Raises:
        ExtentError: a byte is in no extent of its side.
    """
    if 0 < len(pairs) <= FEW and (found := _of_lone_blocks(source, destination, pairs)) is not None:
        return found
    merged = _unsplit(source, destination, pairs)
    at_destination = _split(merged, merged.destination, destination)
    return _in_order(_split(at_destination, at_destination.source, source))


def _unsplit(source: CacheGeometry, destination: CacheGeometry, pairs: Sequence[BlockPair]) -> Copies:
    """What :func:`copies_for` returns where no extent ends within a copy."""
    parts = []
    for group in sorted({pair.group for pair in pairs}):
        runs = _block_runs([(pair.source, pair.destination) for pair in pairs if pair.group == group])
        for left, right in paired_runs(source, destination, group):
            parts.append(_layer_copies(left, right, runs))
    if not parts:
        empty = np.empty(0, np.int64)
        return Copies(empty, empty, empty)
    return _merged(Copies(*(np.concatenate([getattr(part, name) for part in parts]) for name in Copies.__slots__)))


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The copies of every block of a group: those of block 0, and by how many bytes those of the next lie further."""

    first: Copies
    source_stride: int
    destination_stride: int


@lru_cache(maxsize=64)
def _pattern(source: CacheGeometry, destination: CacheGeometry, group: int) -> _Pattern | None:
    """None where blocks differ in more than where they lie: other strides in other layers, or extents that cut some."""
    strides = {(left.block_stride, right.block_stride) for left, right in paired_runs(source, destination, group)}
    if len(strides) != 1:
        return None
    first, (from_stride, to_stride) = _unsplit(source, destination, [BlockPair(group, 0, 0)]), strides.pop()
    for side, geometry, stride in ((first.source, source, from_stride), (first.destination, destination, to_stride)):
        begins, ends = _borders(geometry.extent_runs)
        found = np.searchsorted(begins, side, side="right") - 1
        last = side + first.nbytes + (geometry.num_blocks - 1) * stride
        if np.any(found < 0) or np.any(last > ends[found]):
            return None
    return _Pattern(first, from_stride, to_stride)


def _of_lone_blocks(source: CacheGeometry, destination: CacheGeometry, pairs: Sequence[BlockPair]) -> Copies | None:
    """A small request's copies, soon: planning anew takes half a millisecond on an engine that has just woken up.

    None where that is needed: blocks that are neighbours on both sides, of several groups, or not alike.
    """
    group = pairs[0].group
    blocks = sorted([(pair.destination, pair.source) for pair in pairs if pair.group == group])
    lone = all(after != (before[0] + 1, before[1] + 1) for before, after in pairwise(blocks))
    in_range = blocks[-1][0] < destination.num_blocks and max(block for _, block in blocks) < source.num_blocks
    if not (lone and in_range and len(blocks) == len(pairs)) or (same := _pattern(source, destination, group)) is None:
        return None
    if len(blocks) == 1:
        to, begin = blocks[0]
        first = same.first
        return Copies(
            first.source + begin * same.source_stride, first.destination + to * same.destination_stride, first.nbytes
        )
    table = np.array(blocks, np.int64)
    return _in_order(
        Copies(
            np.add.outer(same.first.source, table[:, 1] * same.source_stride).ravel(),
            np.add.outer(same.first.destination, table[:, 0] * same.destination_stride).ravel(),
            np.repeat(same.first.nbytes, len(blocks)),
        )
    )


def _block_runs(pairs: Sequence[tuple[int, int]]) -> Array:
    """``[runs, 3]``: first source block, first destination block, and how many blocks follow each other on both."""
    blocks = np.array(sorted(pairs, key=lambda pair: pair[1]), np.int64).reshape(-1, 2)
    breaks = np.any(np.diff(blocks, axis=0) != 1, axis=1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    counts = np.diff(np.concatenate((starts, [len(blocks)])))
    return np.column_stack((blocks[starts], counts))


def _layer_copies(left: LayerRun, right: LayerRun, runs: Array) -> Copies:
    """The copies of all layers of two runs of equal count, not yet merged."""
    dense = all(run.piece_nbytes == run.page_nbytes == run.block_stride for run in (left, right))
    if dense:
        first, lengths, piece = runs[:, :2], runs[:, 2] * left.page_nbytes, left.page_nbytes
    else:
        first, piece = _every_block(runs), min(left.piece_nbytes, right.piece_nbytes)
        lengths = np.full(len(first), piece, np.int64)
    sides = [_offsets(run, first[:, side], piece) for side, run in enumerate((left, right))]
    shape = sides[0].shape
    return Copies(sides[0].ravel(), sides[1].ravel(), np.broadcast_to(lengths[None, :, None], shape).ravel())


def _every_block(runs: Array) -> Array:
    """``[blocks, 2]``: each block of the runs by itself."""
    within = np.arange(runs[:, 2].sum()) - np.repeat(np.cumsum(runs[:, 2]) - runs[:, 2], runs[:, 2])
    every: Array = np.repeat(runs[:, :2], runs[:, 2], axis=0) + within[:, None]
    return every


def _offsets(run: LayerRun, blocks: Array, piece: int) -> Array:
    """``[layers, blocks, pieces]``: where each piece of `piece` bytes begins; it divides the pieces of the run."""
    layers = run.offset + np.arange(run.count, dtype=np.int64) * run.layer_stride
    pieces = np.add.outer(
        np.array(run.piece_offsets(), np.int64), np.arange(0, run.piece_nbytes, piece, dtype=np.int64)
    )
    offsets: Array = layers[:, None, None] + (blocks * run.block_stride)[None, :, None] + pieces.ravel()[None, None, :]
    return offsets


def _in_order(copies: Copies) -> Copies:
    if np.all(copies.destination[1:] >= copies.destination[:-1]):
        return copies  # as in layer-outermost layouts; sorting takes longer than all the rest
    order = np.argsort(copies.destination, kind="stable")
    return Copies(copies.source[order], copies.destination[order], copies.nbytes[order])


def _merged(copies: Copies) -> Copies:
    """Neighbours on both sides as one. No two destinations overlap, so that neighbours follow each other by order."""
    copies = _in_order(copies)
    breaks = (np.diff(copies.source) != copies.nbytes[:-1]) | (np.diff(copies.destination) != copies.nbytes[:-1])
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return Copies(copies.source[starts], copies.destination[starts], np.add.reduceat(copies.nbytes, starts))


@lru_cache(maxsize=64)  # a geometry lives as long as a connection, and has thousands of extents in a fragmented cache
def _borders(extent_runs: tuple[ExtentRun, ...]) -> tuple[Array, Array]:
    """Where extents begin and end, in address order."""
    parts = [run.offset + np.arange(run.count, dtype=np.int64) * run.stride for run in extent_runs]
    begins = np.concatenate(parts)
    ends = begins + np.repeat([run.nbytes for run in extent_runs], [run.count for run in extent_runs])
    order = np.argsort(begins)
    return begins[order], ends[order]


def _split(copies: Copies, side: Array, geometry: CacheGeometry) -> Copies:
    """Cut at the extents of one side; `side` is that side's offsets."""
    begins, ends = _borders(geometry.extent_runs)
    done = []
    while True:
        found = np.searchsorted(begins, side, side="right") - 1
        room = ends[found] - side
        if np.any(found < 0) or np.any(room <= 0):
            raise ExtentError(
                f"{int(np.sum((found < 0) | (room <= 0)))} range(s) of a transfer begin outside the committed prefix; "
                "name committed blocks only, or handshake again."
            )
        now = np.minimum(room, copies.nbytes)
        done.append(Copies(copies.source, copies.destination, now))
        rest = copies.nbytes > now
        if not rest.any():
            break
        side = (side + now)[rest]
        copies = Copies((copies.source + now)[rest], (copies.destination + now)[rest], (copies.nbytes - now)[rest])
    if len(done) == 1:
        return done[0]
    return Copies(*(np.concatenate([getattr(part, name) for part in done]) for name in Copies.__slots__))
