"""The parts of a reservation, and what they must keep to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdkv.errors import CapacityError, StateError
from pdkv.memory._ranges import RangeSet


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reservation that one chunk backs, or is to back.

    Attributes:
        offset: first byte, counted from the reservation's address; a multiple of the granule.
        nbytes: size; a positive multiple of the granule.
    """

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReleaseReport:
    """What a release did, in bytes.

    Attributes:
        released: size of the chunks that this process let go.
        given_back: how much of it is free again, as the operating system or driver counts it.
        pinned: how much is not, because a peer, or a descriptor that was exported, still holds it.
    """

    released: int
    given_back: int
    pinned: int


def total(pieces: Iterable[Piece]) -> int:
    """Bytes in all pieces."""
    return sum(piece.nbytes for piece in pieces)


def checked_range(offset: int, nbytes: int, reserved: int) -> None:
    """Raise CapacityError unless the range lies inside `reserved` bytes."""
    if offset < 0 or nbytes < 0 or offset + nbytes > reserved:
        raise CapacityError(f"{nbytes} bytes at {offset} do not lie inside the {reserved} bytes reserved")


def checked(pieces: Sequence[Piece], granule: int, reserved: int) -> list[Piece]:
    """The pieces in order.

    Raises:
        CapacityError: one lies outside `reserved` bytes, is not of whole granules, or overlaps another.
    """
    end = 0
    ordered = sorted(pieces, key=lambda piece: piece.offset)
    for piece in ordered:
        checked_range(piece.offset, piece.nbytes, reserved)
        if piece.offset % granule or piece.nbytes % granule or piece.nbytes == 0:
            raise CapacityError(f"{piece} is not a positive multiple of the granule {granule}")
        if piece.offset < end:
            raise CapacityError(f"{piece} overlaps the piece before it, which ends at {end}")
        end = piece.offset + piece.nbytes
    return ordered


def check_unmapped(piece: Piece, mapped: RangeSet, allowed: Sequence[int] = ()) -> None:
    """Raise StateError where the piece reaches a mapped range whose offset is not in `allowed`."""
    if mapped.is_free(piece.offset, piece.nbytes):
        return
    for offset, nbytes in mapped.overlapping(piece.offset, piece.nbytes):
        if offset not in allowed:
            raise StateError(f"{piece} reaches memory that is mapped already, at {offset} + {nbytes}")


def chunks_inside(region: Piece, mapped: RangeSet) -> list[int]:
    """Offsets of the mapped ranges in the region; StateError where one lies only partly in it."""
    found = mapped.overlapping(region.offset, region.nbytes)
    for offset, nbytes in found:
        if offset < region.offset or offset + nbytes > region.offset + region.nbytes:
            raise StateError(f"the chunk at {offset} + {nbytes} lies partly outside the region {region}")
    return [offset for offset, _ in found]
