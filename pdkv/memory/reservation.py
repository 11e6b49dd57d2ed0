"""A range of addresses that is backed in parts, changed by transactions: whole or not at all (I7)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdkv.errors import CapacityError, DriverError, OutOfMemoryError, StateError
from pdkv.memory._backing import Backing, ContentsLostError
from pdkv.memory._pieces import Piece, ReleaseReport, check_unmapped, checked, checked_range, chunks_inside, total
from pdkv.memory.driver import MappedChunk, MemoryDriver, PhysicalChunk

if TYPE_CHECKING:
    import torch


class Reservation:
    """Addresses that never move, and the physical memory that comes and goes behind them.

    An operation that fails raises a :class:`pdkv.errors.PdkvError`, leaves contents and mappings as they were, and can
    be tried again. Where contents could not be kept all the same, the error says so and `epoch` has risen.

    Attributes:
        driver: the memory driver.
        address: first address, aligned to the granule.
        nbytes: size of the range; offsets are relative to its start.
        epoch: rises whenever memory behind mapped bytes was replaced or taken away. Growth leaves it alone.
    """

    def __init__(self, driver: MemoryDriver, nbytes: int) -> None:
        """Reserve addresses; takes no memory.

        Args:
            driver: where the memory comes from; outlives the reservation and all views.
            nbytes: a positive multiple of the driver's granule.

        Raises:
            CapacityError: it is not.
            DriverError: the addresses cannot be had.
        """
        if nbytes <= 0 or nbytes % driver.granule:
            raise CapacityError(f"a reservation must be a positive multiple of {driver.granule} bytes, not {nbytes}")
        self._backing: Backing | None = Backing(driver, nbytes)
        self.driver = driver
        self.address = self._backing.address
        self.nbytes = nbytes
        self.epoch = 0

    @property
    def physical_bytes(self) -> int:
        """Bytes of physical memory held; 0 after :meth:`release` and :meth:`close`."""
        return self._backing.physical_bytes if self._backing else 0

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What is mapped by the reservation's own books, in order. For the driver's answer ask :meth:`chunks`."""
        return tuple(Piece(*part) for part in self._backing.wanted) if self._backing else ()

    # -- changing the backing

    def add(self, pieces: Sequence[Piece]) -> None:
        """Back each piece with a new chunk, zeroed.

        Raises:
            CapacityError: a piece is no multiple of the granule, lies outside, or overlaps another one.
            StateError: something is mapped there already, or the reservation is closed.
            OutOfMemoryError: memory is short; `wanted` counts all pieces. Nothing was changed.
            DriverError: the driver refused. Nothing was changed.
        """
        backing = self._swept()
        wanted = checked(pieces, self.driver.granule, self.nbytes)
        for piece in wanted:
            check_unmapped(piece, backing.ranges)
        self._back(backing, wanted)

    def replace(self, pieces: Sequence[Piece]) -> None:
        """Make these pieces, zeroed, the whole backing. What was mapped is discarded.

        New chunks are created beside the old ones, so that a failure leaves the old contents in place. Where memory is
        too short for both, the old chunks are released first; if the new ones still cannot be had, chunks of the old
        sizes are mapped again, zeroed, and the error says that the contents were lost.

        Raises:
            CapacityError, StateError: as for :meth:`add`.
            OutOfMemoryError: free memory and the old chunks together do not suffice. Nothing was changed.
            DriverError: the driver refused.
        """
        backing = self._swept()
        wanted = checked(pieces, self.driver.granule, self.nbytes)
        need, free = total(wanted), self.driver.memory_info().free
        # What a peer pins would not become free.
        held = sum(chunk.nbytes for chunk in backing.mapped.values() if not self.driver.is_pinned(chunk))
        if need > free + held:
            raise self._short(need, free, f", and {held} of the memory held now would become free")
        chunks = self._create_beside(backing, wanted) if need <= free else None
        if chunks is None:
            self._replace_in_place(backing, wanted)
        else:
            self._swap(backing, list(backing.mapped), lambda: backing.back(wanted, chunks), chunks)

    def replace_preserving(self, region: Piece, new: Piece) -> None:
        """Back the start of `region` with the one chunk `new` in place of all chunks there; other regions stay.

        `new` begins where `region` begins. It holds what the region held up to the first byte that was not backed, and
        zeros after that. Old and new memory are held at once while it runs.

        Raises:
            CapacityError: a piece is no multiple of the granule, lies outside, or the two do not begin together.
            StateError: a chunk lies partly in the region, `new` reaches a chunk outside it, or all is closed.
            OutOfMemoryError: no room for the new chunk beside the old ones. Nothing was changed.
            DriverError: the driver refused. Nothing was changed.
        """
        backing = self._swept()
        for piece in (region, new):
            checked([piece], self.driver.granule, self.nbytes)
        if new.offset != region.offset:
            raise CapacityError(f"the new piece begins at {new.offset}, the region at {region.offset}; make them equal")
        old = chunks_inside(region, backing.ranges)
        check_unmapped(new, backing.ranges, allowed=old)
        with self._speaking_of(new.nbytes):
            chunk = backing.create(new.nbytes)
        try:
            self._fill_elsewhere(backing, new, chunk)
        except BaseException:
            backing.discard(chunks=[chunk])
            raise
        self._swap(backing, old, lambda: backing.map(new.offset, chunk), [chunk])

    def release(self) -> ReleaseReport:
        """Unmap and release everything. Addresses and views stay; touching them is a fault until :meth:`add`."""
        backing = self._swept()
        free_before = self.driver.memory_info().free
        held_elsewhere = [(chunk.nbytes, self.driver.is_pinned(chunk)) for chunk in backing.mapped.values()]
        chunks = [chunk for _, chunk in self._unmap(backing, list(backing.mapped))]
        self.epoch += bool(chunks)
        for chunk in chunks:
            backing.release(chunk)
        released = sum(chunk.nbytes for chunk in chunks)
        pinned = sum(nbytes for nbytes, elsewhere in held_elsewhere if elsewhere)
        unclear = sum(nbytes for nbytes, elsewhere in held_elsewhere if elsewhere is None)
        if unclear:
            gained = self.driver.memory_info().free - free_before - (released - pinned - unclear)
            pinned += unclear - min(max(gained, 0), unclear)
        return ReleaseReport(released, released - pinned, pinned)

    def close(self) -> None:
        """Release the memory at once, and the addresses as soon as no view is alive. Idempotent.

        Until the last view has died its addresses stay reserved without memory, so that nobody else's memory can appear
        under it: touching it is a fault, never a silent read of something else.
        """
        if self._backing is not None:
            self.release()
            self._backing.close()
            self._backing = None

    # -- looking at it

    def chunks(self, offset: int = 0, nbytes: int | None = None) -> tuple[MappedChunk, ...]:
        """What the operating system or driver says is mapped in the range; in all of it unless told otherwise."""
        self._open()
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        checked_range(offset, nbytes, self.nbytes)
        return self.driver.query_chunks(self.address + offset, nbytes) if nbytes else ()

    def export_fds(self) -> tuple[tuple[Piece, int], ...]:
        """A descriptor for each mapped chunk, in order; the caller owns and closes them.

        Raises:
            DriverError: the driver cannot export; no descriptor is left open.
        """
        backing = self._open()
        exported: list[tuple[Piece, int]] = []
        try:
            for piece in self.pieces:
                exported.append((piece, self.driver.export_fd(backing.mapped[piece.offset])))
        except BaseException:
            for _, fd in exported:
                os.close(fd)
            raise
        return tuple(exported)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A one-dimensional int8 tensor over the range, mapped or not, whose storage is exactly the range.

        Making it touches no page. Touching a part of it that is not mapped is a fault of the process.

        Raises:
            CapacityError: the range is empty or not inside the reservation.
        """
        backing = self._open()
        checked_range(offset, nbytes, self.nbytes)
        if nbytes == 0:
            raise CapacityError("a tensor over a reservation needs at least one byte")
        return self.driver.tensor(self.address + offset, nbytes, backing.keepalive())

    # -- steps

    def _back(self, backing: Backing, pieces: Sequence[Piece]) -> None:
        with self._speaking_of(total(pieces)):
            backing.back(pieces)

    def _create_beside(self, backing: Backing, pieces: Sequence[Piece]) -> list[PhysicalChunk] | None:
        """One loose chunk for each piece, or None where memory is short after all."""
        created: list[PhysicalChunk] = []
        try:
            for piece in pieces:
                created.append(backing.create(piece.nbytes))
        except BaseException as error:
            backing.discard(chunks=created)
            if isinstance(error, OutOfMemoryError):
                return None
            raise
        return created

    def _swap(
        self, backing: Backing, old: Sequence[int], map_new: Callable[[], None], chunks: Sequence[PhysicalChunk]
    ) -> None:
        """Unmap what is at the offsets `old`, map the loose `chunks` by `map_new`, release the old.

        Where that fails, the old is mapped again and `chunks` are released. A `map_new` that fails has mapped nothing.
        """
        try:
            unmapped = self._unmap(backing, old)
        except BaseException:
            backing.discard(chunks=chunks)
            raise
        try:
            map_new()
        except BaseException as error:
            backing.discard(chunks=chunks)
            self._map_again(backing, unmapped, error)
            raise
        self.epoch += bool(unmapped)
        backing.discard(chunks=[chunk for _, chunk in unmapped])

    def _replace_in_place(self, backing: Backing, pieces: Sequence[Piece]) -> None:
        """Release the old chunks, then back `pieces`; where that fails, back the old sizes again."""
        before = self.pieces
        unmapped = self._unmap(backing, list(backing.mapped))
        self.epoch += bool(unmapped)
        backing.discard(chunks=[chunk for _, chunk in unmapped])
        try:
            self._back(backing, pieces)
        except DriverError as error:
            self._restore_sizes(backing, before, error)

    def _restore_sizes(self, backing: Backing, before: Sequence[Piece], cause: DriverError) -> None:
        """Map zeroed memory of the old sizes again and raise `cause` with word of what became of the contents."""
        fate = "the old contents were lost; memory of the old sizes is mapped again, zeroed"
        try:
            backing.sweep()
            self._back(backing, before)
        except DriverError as error:
            fate = f"the old contents were lost, and memory of the old sizes could not be had again ({error})"
        if isinstance(cause, OutOfMemoryError):
            raise OutOfMemoryError(f"{cause}; {fate}", wanted=cause.wanted, free=cause.free) from cause
        raise ContentsLostError(f"{cause}; {fate}") from cause

    def _fill_elsewhere(self, backing: Backing, new: Piece, chunk: PhysicalChunk) -> None:
        """Map the chunk at a spare address, copy the region's backed prefix into it, zero the rest, unmap it."""
        spare = Backing(self.driver, new.nbytes)
        try:
            spare.adopt(chunk, backing)
            spare.map(0, chunk)
            self._copy_prefix(backing, new, spare.address)
            spare.unmap(0)
            backing.adopt(chunk, spare)
        finally:
            backing.discard_spare(spare)

    def _copy_prefix(self, backing: Backing, new: Piece, spare: int) -> None:
        kept = backing.ranges.covered(new.offset, new.nbytes)
        # Chunk by chunk: not every driver copies across the border of two chunks.
        for offset, nbytes in backing.ranges.overlapping(new.offset, kept):
            end = min(offset + nbytes, new.offset + kept)
            self.driver.copy(spare + offset - new.offset, self.address + offset, end - offset)
        if kept < new.nbytes:
            self.driver.zero(spare + kept, new.nbytes - kept)

    def _unmap(self, backing: Backing, offsets: Sequence[int]) -> list[tuple[int, PhysicalChunk]]:
        with self._epoch_of_losses():
            return backing.unmap_all(offsets)

    def _map_again(self, backing: Backing, unmapped: Sequence[tuple[int, PhysicalChunk]], cause: BaseException) -> None:
        with self._epoch_of_losses():
            backing.map_again(unmapped, cause)

    # -- checks

    def _open(self) -> Backing:
        if self._backing is None:
            raise StateError("this reservation is closed; make another one")
        return self._backing

    def _swept(self) -> Backing:
        backing = self._open()
        backing.sweep()
        return backing

    @contextmanager
    def _epoch_of_losses(self) -> Iterator[None]:
        try:
            yield
        except ContentsLostError:
            self.epoch += 1
            raise

    @contextmanager
    def _speaking_of(self, need: int) -> Iterator[None]:
        """Let a driver's error about one chunk, whose operation has been undone, speak of all `need` bytes."""
        try:
            yield
        except OutOfMemoryError as error:
            raise self._short(need, self.driver.memory_info().free, f" now ({error})") from error

    def _short(self, need: int, free: int, more: str) -> OutOfMemoryError:
        message = (
            f"{self.driver.name} memory is short: {need} bytes wanted, {free} free{more}; ask for less or free some"
        )
        return OutOfMemoryError(message, wanted=need, free=free)


__all__ = ["Piece", "ReleaseReport", "Reservation"]
