"""Ranges that may be registered with a transport.

An extent is where a chunk, as the driver reports it, meets the committed prefix of a segment. A transport that
registers a range over two chunks may move wrong data without an error, and one that registers memory which is not there
lets a peer kill this process. So nothing is registered that is not one extent, or a part of one (I5, I6).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pdkv.errors import ExtentError
from pdkv.memory.driver import MappedChunk


@dataclass(frozen=True, slots=True)
class Chunk:
    """Physical memory behind a segment: `nbytes` mapped `offset` bytes after the segment's first byte."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """A range within one segment's committed prefix and within one chunk.

    Attributes:
        address: first byte, as a virtual address.
        nbytes: length in bytes; only committed blocks, so that it may end before its chunk does.
        device_id: device number as transports count it; 0 on the host.
        segment: index into ``cache.segments``.
        chunk: index into ``cache.chunks(segment)``.
    """

    address: int
    nbytes: int
    device_id: int
    segment: int
    chunk: int

    @property
    def end(self) -> int:
        """First address after the extent."""
        return self.address + self.nbytes


def segment_extents(
    chunks: Iterable[MappedChunk], address: int, nbytes: int, *, segment: int, device_id: int
) -> tuple[Extent, ...]:
    """The extents of one segment, whose committed prefix is `nbytes` from `address`; `chunks` in address order."""
    end = address + nbytes
    extents = []
    for index, chunk in enumerate(chunks):
        begin, stop = max(address, chunk.address), min(end, chunk.address + chunk.nbytes)
        if begin < stop:
            extents.append(Extent(begin, stop - begin, device_id, segment, index))
    return tuple(extents)


def find_extent(extents: Sequence[Extent], address: int, nbytes: int) -> Extent:
    """The one extent that holds `nbytes` bytes from `address`.

    Raises:
        ExtentError: the range is empty, or not within one extent; the message says what lies there instead.
    """
    end = address + nbytes
    for extent in extents:
        if nbytes > 0 and extent.address <= address and end <= extent.end:
            return extent
    raise ExtentError(_why_not(extents, address, nbytes))


def split_at_extents(extents: Sequence[Extent], address: int, nbytes: int) -> tuple[Extent, ...]:
    """`nbytes` bytes from `address` as parts, in address order, none of which crosses the border of an extent.

    Raises:
        ExtentError: a byte of the range is in no extent.
    """
    end = address + nbytes
    parts = []
    reached = address
    for extent in sorted(extents, key=lambda extent: extent.address):
        begin, stop = max(address, extent.address), min(end, extent.end)
        if begin >= stop:
            continue
        if begin != reached:
            break
        parts.append(replace(extent, address=begin, nbytes=stop - begin))
        reached = stop
    if reached != end or nbytes <= 0:
        raise ExtentError(_why_not(extents, address, nbytes))
    return tuple(parts)


def _why_not(extents: Sequence[Extent], address: int, nbytes: int) -> str:
    """One sentence on why a range is not one extent, or not covered by extents."""
    what = f"the range of {nbytes} bytes at {address:#x}"
    if nbytes <= 0:
        return f"{what} is empty; register or transfer at least one byte."
    touched = [extent for extent in extents if extent.address < address + nbytes and address < extent.end]
    covered = sum(min(extent.end, address + nbytes) - max(extent.address, address) for extent in touched)
    if covered == nbytes:
        return f"{what} crosses {len(touched) - 1} chunk border(s); split it there, or commit with defragment=True."
    return (
        f"{what} has {nbytes - covered} bytes outside the committed prefix; use the ranges that extents() gives, "
        f"or commit more blocks first."
    )
