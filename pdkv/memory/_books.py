"""What a driver remembers of its own doings, and the calls that it refuses by that: each before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdkv.errors import DriverError
from pdkv.memory._ranges import RangeSet
from pdkv.memory.driver import PhysicalChunk


class DriverBooks:
    """Reservations, chunks and mappings of one driver. Addresses and sizes are in bytes.

    Whoever makes a change notes it here once it has succeeded. Every check raises DriverError.

    Attributes:
        granule: the driver's granule.
        reservations: size by first address.
        chunks: those that were created and not yet released, by handle.
        mapped: every mapping.
        read_only: those of them that are for reading only.
    """

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.reservations: dict[int, int] = {}
        self.chunks: dict[Any, PhysicalChunk] = {}
        self.mapped = RangeSet()
        self.read_only = RangeSet()

    def note_mapped(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """A chunk is mapped there now."""
        self.mapped.add(address, nbytes)
        if read_only:
            self.read_only.add(address, nbytes)

    def note_unmapped(self, address: int) -> None:
        """The mapping that began there is gone."""
        self.mapped.remove(address)
        if self.read_only.get(address) is not None:
            self.read_only.remove(address)

    def check_size(self, nbytes: int) -> None:
        """A size that can be reserved or created."""
        if nbytes <= 0 or nbytes % self.granule:
            raise DriverError(f"sizes must be positive multiples of the granule {self.granule}, not {nbytes}")

    def check_chunk(self, chunk: PhysicalChunk) -> None:
        """A chunk of this driver. By identity: a released chunk's handle may have come back for another one."""
        if self.chunks.get(chunk.handle) is not chunk:
            raise DriverError(f"{chunk} is not a chunk of this driver, or has been released")

    def check_unreserve(self, address: int, nbytes: int) -> None:
        """One whole reservation with nothing mapped in it."""
        if self.reservations.get(address) != nbytes:
            raise DriverError(f"0x{address:x} + {nbytes} is not a whole reservation of this driver")
        if self.mapped.overlapping(address, nbytes):
            raise DriverError(f"the reservation at 0x{address:x} still has chunks mapped in it; unmap them first")

    def check_map(self, address: int, chunk: PhysicalChunk) -> None:
        """A chunk of this driver, and free addresses for it inside one reservation."""
        self.check_chunk(chunk)
        self._check_place(address, chunk.nbytes)
        self.reservation_around(address, chunk.nbytes)

    def check_back(self, ranges: Sequence[tuple[int, int]], chunks: Sequence[PhysicalChunk]) -> None:
        """Chunks of this driver, and free addresses, each range inside one reservation and apart from the others."""
        for chunk in chunks:
            self.check_chunk(chunk)
        low = high = end = 0  # the reservation around the last range, and where that range ended
        for address, nbytes in sorted(ranges):
            self.check_size(nbytes)
            if address < end:
                raise DriverError(f"0x{address:x} + {nbytes} overlaps another range, which ends at 0x{end:x}")
            end = address + nbytes
            if address < low or end > high:
                low, size = self.reservation_around(address, nbytes)
                high = low + size
            self._check_place(address, nbytes)

    def _check_place(self, address: int, nbytes: int) -> None:
        if address % self.granule:
            raise DriverError(f"0x{address:x} is no multiple of the granule {self.granule}")
        if not self.mapped.is_free(address, nbytes):
            raise DriverError(f"something is mapped already in 0x{address:x} + {nbytes}; unmap it first")

    def check_unmap(self, address: int, nbytes: int) -> None:
        """One whole mapping."""
        if self.mapped.get(address) != nbytes:
            raise DriverError(f"0x{address:x} + {nbytes} is not one whole mapping of this driver")

    def check_mapped(self, address: int, nbytes: int) -> None:
        """A range every byte of which is mapped; it may be empty."""
        covered = self.mapped.covered(address, nbytes)
        if nbytes < 0 or covered < nbytes:
            raise DriverError(f"0x{address + covered:x} is not mapped; nothing was touched")

    def check_writable(self, address: int, nbytes: int) -> None:
        """A range every byte of which is mapped for writing."""
        self.check_mapped(address, nbytes)
        if self.read_only.overlapping(address, nbytes):
            raise DriverError(f"a part of 0x{address:x} + {nbytes} is mapped for reading only; nothing was touched")

    def check_copy(self, destination: int, source: int, nbytes: int) -> None:
        """Two mapped ranges that do not overlap."""
        self.check_writable(destination, nbytes)
        self.check_mapped(source, nbytes)
        if abs(destination - source) < nbytes:
            raise DriverError(f"cannot copy {nbytes} bytes between ranges that overlap")

    def check_tensor(self, address: int, nbytes: int) -> None:
        """At least one byte, inside one reservation, mapped or not."""
        if nbytes < 1:
            raise DriverError(f"a tensor needs at least one byte, not {nbytes}")
        self.reservation_around(address, nbytes)

    def reservation_around(self, address: int, nbytes: int) -> tuple[int, int]:
        """(first address, size) of the reservation that holds the whole range."""
        for start, size in list(self.reservations.items()):
            if start <= address and address + nbytes <= start + size:
                return start, size
        raise DriverError(f"0x{address:x} + {nbytes} lies in no reservation of this driver")
