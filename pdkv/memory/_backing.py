"""The books of one reservation: which chunk is mapped where, and what has yet to be given back.

Every chunk that was created is in one of two places, `mapped` or `loose`, and is moved by the very step that changes
its state. So whatever fails, the books agree with the driver, and what could not be given back is tried again later.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pdkv.errors import DriverError, PdkvError
from pdkv.memory._pieces import Piece
from pdkv.memory._ranges import RangeSet
from pdkv.memory.driver import MemoryDriver, PhysicalChunk, Progress

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Backing:
    """One range of addresses and the chunks behind it; lives as long as its reservation and every view over it.

    Offsets are bytes from `address`. When the last holder is gone, whatever is left is unmapped, released and
    unreserved; except at interpreter exit, where the process takes everything with it and drivers may be gone.
    """

    def __init__(self, driver: MemoryDriver, nbytes: int) -> None:
        self.driver = driver
        self.nbytes = nbytes
        self.mapped: dict[int, PhysicalChunk] = {}
        self.ranges = RangeSet()
        self.loose: list[PhysicalChunk] = []
        # Kept, though it could be added up: a cache that grew in small steps has thousands of chunks.
        self._held = 0
        self._unwanted: set[int] = set()
        self._spares: list[Backing] = []
        self._pid = os.getpid()
        self._views: weakref.ref[_ViewToken] | None = None
        self._reserved = False
        self.address = driver.reserve(nbytes)
        self._reserved = True

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """(offset, nbytes) of what is mapped on purpose, in order; not the leftovers of a failure."""
        return [(offset, nbytes) for offset, nbytes in self.ranges if offset not in self._unwanted]

    @property
    def physical_bytes(self) -> int:
        """Bytes of all chunks held, mapped or not."""
        return self._held + sum(spare.physical_bytes for spare in self._spares)

    # -- single steps

    def create(self, nbytes: int) -> PhysicalChunk:
        """A new chunk, loose."""
        chunk = self.driver.create(nbytes)
        self.loose.append(chunk)
        self._held += nbytes
        return chunk

    def map(self, offset: int, chunk: PhysicalChunk) -> None:
        """Map a loose chunk."""
        self.driver.map(self.address + offset, chunk)
        self.mapped[offset] = chunk
        self.ranges.add(offset, chunk.nbytes)
        self._remove_loose(chunk)

    def take(self, chunk: PhysicalChunk, offset: int, *, read_only: bool) -> None:
        """Map a chunk that the driver made otherwise, an imported one; it is loose where that fails."""
        self.loose.append(chunk)
        self._held += chunk.nbytes
        if not read_only:
            self.map(offset, chunk)
            return
        self.driver.map_read_only(self.address + offset, chunk)
        self.mapped[offset] = chunk
        self.ranges.add(offset, chunk.nbytes)
        self._remove_loose(chunk)

    def unmap(self, offset: int) -> PhysicalChunk:
        """Unmap the chunk at `offset`, which becomes loose."""
        chunk = self.mapped[offset]
        self.driver.unmap(self.address + offset, chunk.nbytes)
        self.loose.append(chunk)
        del self.mapped[offset]
        self.ranges.remove(offset)
        self._unwanted.discard(offset)
        return chunk

    def release(self, chunk: PhysicalChunk) -> None:
        """Release a loose chunk."""
        self.driver.release(chunk)
        self._remove_loose(chunk)
        self._held -= chunk.nbytes

    def adopt(self, chunk: PhysicalChunk, other: Backing) -> None:
        """Take over a loose chunk of another range."""
        self.loose.append(chunk)
        self._held += chunk.nbytes
        other._remove_loose(chunk)
        other._held -= chunk.nbytes

    # -- several steps

    def back(self, pieces: Sequence[Piece], chunks: Sequence[PhysicalChunk] = ()) -> None:
        """Map a chunk at each piece, zeroed: the loose `chunks` at the first ones, new ones at the others.

        All or nothing: where it fails, none of the pieces is backed, and all of the chunks are released.
        """
        progress = Progress(list(chunks))
        try:
            self.driver.back([(self.address + piece.offset, piece.nbytes) for piece in pieces], progress)
        except BaseException:
            self._note(pieces, progress, chunks)
            self.discard([piece.offset for piece in pieces[: progress.mapped]], progress.chunks)
            raise
        self._note(pieces, progress, chunks)

    def _note(self, pieces: Sequence[Piece], progress: Progress, before: Sequence[PhysicalChunk]) -> None:
        """Take into the books what `progress` says. The chunks `before` were loose."""
        for chunk in before:
            self._remove_loose(chunk)
        self.loose += progress.chunks[progress.mapped :]
        self._held += sum(chunk.nbytes for chunk in progress.chunks[len(before) :])
        for piece, chunk in zip(pieces[: progress.mapped], progress.chunks, strict=False):
            self.mapped[piece.offset] = chunk
            self.ranges.add(piece.offset, chunk.nbytes)

    def unmap_all(self, offsets: Sequence[int]) -> list[tuple[int, PhysicalChunk]]:
        """Unmap the chunks at the offsets and return them, loose; where one cannot be, all stay mapped."""
        unmapped: list[tuple[int, PhysicalChunk]] = []
        try:
            for offset in sorted(offsets):
                unmapped.append((offset, self.unmap(offset)))
        except BaseException as error:
            self.map_again(unmapped, error)
            raise
        return unmapped

    def map_again(self, unmapped: Sequence[tuple[int, PhysicalChunk]], cause: BaseException) -> None:
        """Put chunks back after `cause`.

        Raises:
            ContentsLostError: the driver refuses.
        """
        try:
            for offset, chunk in unmapped:
                self.map(offset, chunk)
        except PdkvError as error:
            raise ContentsLostError(
                f"{cause}; mapping the old memory again failed too ({error}): contents were lost"
            ) from cause

    def discard(self, offsets: Iterable[int] = (), chunks: Iterable[PhysicalChunk] = ()) -> None:
        """Take back mappings and loose chunks; what the driver refuses is left for :meth:`sweep`."""
        for offset in sorted(offsets):
            self._unwanted.add(offset)
            self._attempt(self.unmap, offset)
        for chunk in chunks:
            if any(chunk is other for other in self.loose):
                self._attempt(self.release, chunk)

    def discard_spare(self, spare: Backing) -> None:
        """Give back a scratch range and what is in it, now or at the next :meth:`sweep`."""
        self._spares.append(spare)
        self._attempt(self._sweep_spare, spare)

    def sweep(self) -> None:
        """Give back what an earlier failure left behind.

        Raises:
            DriverError: the driver still refuses.
        """
        for spare in list(self._spares):
            self._sweep_spare(spare)
        for offset in sorted(self._unwanted):
            self.unmap(offset)
        for chunk in list(self.loose):
            self.release(chunk)

    # -- lifetime

    def keepalive(self) -> object:
        """What a view holds on to."""
        token = self._views() if self._views else None
        if token is None:
            token = _ViewToken(self)
            self._views = weakref.ref(token)
        return token

    def close(self) -> None:
        """Unreserve now, where no view is alive; else the last one to die does."""
        if self._views is None or self._views() is None:
            self._unreserve()

    def _unreserve(self) -> None:
        if self._reserved:
            self.driver.unreserve(self.address, self.nbytes)
            self._reserved = False

    def _sweep_spare(self, spare: Backing) -> None:
        spare._unwanted.update(spare.mapped)
        spare.sweep()
        spare._unreserve()
        self._spares.remove(spare)

    def _remove_loose(self, chunk: PhysicalChunk) -> None:
        # By identity: handles are used again, so equal chunks need not be the same.
        for index, other in enumerate(self.loose):
            if other is chunk:
                del self.loose[index]
                return

    def _attempt(self, step: Callable[[_T], object], subject: _T) -> None:
        try:
            step(subject)
        except PdkvError as error:
            logger.warning("giving back memory failed, to be tried again: %s", error)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not getattr(self, "_reserved", False) or _is_finalizing() or os.getpid() != self._pid:
            return
        if self.mapped or self.loose:
            warnings.warn(f"a reservation of {self.nbytes} bytes was never closed", ResourceWarning, stacklevel=2)
        self._unwanted.update(self.mapped)
        self.sweep()
        self._unreserve()


class ContentsLostError(DriverError):
    """An operation failed, and so did its undoing: memory that was mapped no longer is."""


class _ViewToken:
    """Held by every view; gone when the last view is."""

    def __init__(self, backing: Backing) -> None:
        self._backing = backing
