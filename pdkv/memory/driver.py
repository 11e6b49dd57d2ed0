"""The contract between pdkv and whoever owns physical memory: an operating system or a GPU driver.

Four things are kept apart, as the CUDA driver keeps them apart:

- a *reservation* is a range of virtual addresses without memory behind it;
- a *chunk* is physical memory without an address;
- a *mapping* puts a whole chunk at an address inside a reservation;
- a *view* is a tensor over addresses, mapped or not.

All sizes and addresses are in bytes and multiples of the driver's granule, unless a method says otherwise. A method
that fails raises a :class:`pdkv.errors.DriverError` and leaves everything as it was before the call; the two that take
many ranges, `back` and `zero_all`, say themselves what is left when they fail half-way. Drivers are used from one
thread at a time, except that `unmap`, `release` and `unreserve` may come at any moment from the thread in which the
last view of a reservation dies; they work after `close` too. `pdkv.testing.check_driver` is the executable form of this
contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdkv.errors import DriverError, OutOfMemoryError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Free and total physical memory in bytes, as the operating system or driver counts them now."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class PhysicalChunk:
    """Physical memory of a driver: `nbytes` long, known to the driver by `handle`.

    `handle` is opaque outside the driver. On the host it is a file descriptor of a memfd, on CUDA a generic allocation
    handle. The same handle value may come back for another chunk once this one was released.
    """

    handle: Any
    nbytes: int


@dataclass(frozen=True, slots=True)
class MappedChunk:
    """One mapping as the operating system or driver reports it, not as anyone remembers it.

    `ident` tells physical chunks apart: two mappings with the same `ident` show the same physical chunk.
    """

    address: int
    nbytes: int
    ident: int


@dataclass(slots=True)
class Progress:
    """How far a :meth:`MemoryDriver.back` has come, kept true after each of its steps.

    Attributes:
        chunks: one for each of the first ranges, in the order of the ranges. Those that are there before the call are
            used, the others are created and appended.
        mapped: so many of them, the first ones, are mapped.
    """

    chunks: list[PhysicalChunk] = field(default_factory=list)
    mapped: int = 0

    def missing(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Sizes of the chunks that have yet to be created.

        Raises:
            DriverError: a chunk that is there has another size than its range.
        """
        sizes = [nbytes for _, nbytes in ranges]
        known = len(self.chunks)
        if [chunk.nbytes for chunk in self.chunks] != sizes[:known]:
            raise DriverError(f"the {known} chunks that are there do not have the sizes of the first ranges")
        return sizes[known:]


class MemoryDriver(ABC):
    """Reserve, create, map, zero, ask, and undo. See the module's docstring for the words."""

    #: Short name by which :func:`pdkv.memory.open_driver` knows it: "host", "cuda", "hip".
    name: str
    #: Device number as transports count it; 0 on the host.
    device_id: int
    #: The smallest size a chunk can have, in bytes; a power of two.
    granule: int

    @abstractmethod
    def reserve(self, nbytes: int) -> int:
        """Reserve `nbytes` of virtual addresses and return the first, aligned to the granule. Takes no memory."""

    @abstractmethod
    def unreserve(self, address: int, nbytes: int) -> None:
        """Give back a whole range that :meth:`reserve` returned. Nothing may be mapped in it any more."""

    @abstractmethod
    def create(self, nbytes: int) -> PhysicalChunk:
        """Allocate one physical chunk.

        Raises:
            OutOfMemoryError: there is not enough memory; it is known here or at :meth:`map`, never at first touch.
        """

    @abstractmethod
    def release(self, chunk: PhysicalChunk) -> None:
        """Let go of a chunk. Its memory is free once no mapping and no importing peer holds it either."""

    def is_pinned(self, chunk: PhysicalChunk) -> bool | None:
        """Whether a peer, or a descriptor that was exported, holds the chunk too, so that releasing it frees nothing.

        None where the driver cannot tell; then free memory before and after a release has to do.
        """
        return None

    @abstractmethod
    def map(self, address: int, chunk: PhysicalChunk) -> None:
        """Map the whole chunk at `address`, inside a reservation, readable and writable, backed by real memory.

        The contents are undefined until :meth:`zero`.

        Raises:
            OutOfMemoryError: physical memory ran out while the chunk was being backed; nothing stays mapped.
        """

    @abstractmethod
    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap the one whole mapping at `address`; the addresses stay reserved. Waits for the device's work first."""

    @abstractmethod
    def zero(self, address: int, nbytes: int) -> None:
        """Fill a mapped range (any multiple of 1 byte, across mappings) with zero bytes, done when it returns."""

    def zero_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        """As :meth:`zero` of each (address, nbytes). Where one cannot be zeroed, those before it may have been.

        Drivers override it where many at once are cheaper than one after the other.
        """
        for address, nbytes in ranges:
            self.zero(address, nbytes)

    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        """Create a chunk for each (address, nbytes), map it there, and let the memory read as zero.

        The same as :meth:`create`, :meth:`map` and :meth:`zero` of each, by which it is done here; drivers override it
        where many at once are cheaper. Chunks that `progress` brings along are mapped at the first ranges; whatever
        they held reads as zero afterwards.

        Where it fails, `progress` tells what was done, which stays done and is the caller's to undo by :meth:`unmap`
        and :meth:`release`: only the caller can keep for later what the driver refuses to take back.

        Raises:
            OutOfMemoryError: there is not enough memory for all.
        """
        missing = progress.missing(ranges)
        self._require_room(sum(missing))
        for nbytes in missing:
            progress.chunks.append(self.create(nbytes))
        for (address, _), chunk in zip(ranges, progress.chunks, strict=True):
            self.map(address, chunk)
            progress.mapped += 1
        self.zero_all(ranges)

    @abstractmethod
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy between two mapped ranges that do not overlap, done when it returns."""

    @abstractmethod
    def query_chunks(self, address: int, nbytes: int) -> tuple[MappedChunk, ...]:
        """Ask the system or driver for every mapping that overlaps the range: each one whole, in address order."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Free and total memory now, as the operating system or driver counts them."""

    @abstractmethod
    def export_fd(self, chunk: PhysicalChunk) -> int:
        """A new file descriptor, owned by the caller, through which another process can map the chunk.

        Peers get their descriptors here only, or :meth:`is_pinned` does not see them.

        Raises:
            DriverError: chunks of this driver cannot be exported.
        """

    def import_fd(self, fd: int, nbytes: int) -> PhysicalChunk:
        """The chunk of `nbytes` bytes behind a descriptor that a peer's :meth:`export_fd` made.

        The descriptor stays the caller's, who may close it at once. The chunk is one like any other here: it can be
        mapped, and holds the memory until it is released. Its contents are the peer's too.

        Raises:
            DriverError: it is no chunk of that size that this driver can map, or the driver cannot import at all.
        """
        raise DriverError(f"the {self.name} driver cannot map chunks of other processes")

    def map_read_only(self, address: int, chunk: PhysicalChunk) -> None:
        """As :meth:`map`, but for reading only. What would write there through the driver is refused."""
        raise DriverError(f"the {self.name} driver has no mappings for reading only")

    @abstractmethod
    def tensor(self, address: int, nbytes: int, keepalive: object) -> torch.Tensor:
        """A one-dimensional int8 tensor over the range, mapped or not, that touches no page.

        The tensor's storage begins at `address` and spans exactly `nbytes`. `keepalive` lives as long as any tensor
        that shares the storage.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work of the device that may still touch mapped memory."""

    def describe(self) -> dict[str, str | int | bool]:
        """What an operator wants to know: name, device, granule, handle type and the like."""
        return {"driver": self.name, "device_id": self.device_id, "granule": self.granule}

    @abstractmethod
    def close(self) -> None:
        """Let go of what the driver itself holds. Idempotent. Chunks and reservations are their owners' to release."""

    def _require_room(self, nbytes: int) -> None:
        """Raise OutOfMemoryError where less than `nbytes` is free."""
        if nbytes and nbytes > (free := self.memory_info().free):
            raise OutOfMemoryError(
                f"{self.name} memory is short: {nbytes} bytes wanted, {free} free", wanted=nbytes, free=free
            )
