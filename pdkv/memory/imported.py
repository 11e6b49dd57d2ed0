"""Chunks of another process, mapped into one range of this one's addresses."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pdkv.errors import CapacityError
from pdkv.memory._backing import Backing
from pdkv.memory._pieces import Piece, checked
from pdkv.memory.driver import MemoryDriver


class ImportedMemory:
    """A peer's chunks at the offsets that they have in the peer's reservation.

    Holds the peer's memory until :meth:`close`: what the peer releases is not free before. Then nothing may be at work
    on it any more. May be closed from any thread.

    Attributes:
        address, nbytes: the range, as long as the peer's reservation.
        pieces: where in it there is memory; elsewhere a touch kills the process.
    """

    def __init__(
        self, driver: MemoryDriver, nbytes: int, chunks: Sequence[tuple[Piece, int]], *, writable: bool = False
    ) -> None:
        """
        Args:
            driver: imports and maps the chunks; its granule divides all sizes.
            nbytes: size of the peer's reservation.
            chunks: what :meth:`Reservation.export_fds` gave. The descriptors stay the caller's.
            writable: map for writing too.

        Raises:
            CapacityError: a piece is no multiple of the granule, lies outside, or overlaps another one.
            DriverError: the driver refused; nothing is held.
        """
        granule = driver.granule
        if nbytes <= 0 or nbytes % granule:
            raise CapacityError(f"a peer's reservation of {nbytes} bytes is no positive multiple of {granule} bytes")
        checked([piece for piece, _ in chunks], granule, nbytes)
        self._lock = threading.Lock()
        self._backing: Backing | None = Backing(driver, nbytes)
        self.address, self.nbytes = self._backing.address, nbytes
        self.pieces = tuple(piece for piece, _ in chunks)
        try:
            for piece, fd in chunks:
                self._backing.take(driver.import_fd(fd, piece.nbytes), piece.offset, read_only=not writable)
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the memory is still held."""
        return self._backing is not None

    def close(self) -> None:
        """Unmap and let go of everything. Idempotent."""
        with self._lock:
            if self._backing is None:
                return
            self._backing.discard(list(self._backing.mapped))
            self._backing.sweep()
            self._backing.close()
            self._backing = None
