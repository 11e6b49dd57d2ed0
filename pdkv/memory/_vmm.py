"""What the CUDA and HIP drivers share: physical chunks mapped into reserved addresses, by calls of the same shape.

A :class:`VmmApi` is a thin table of calls over integers, one per vendor. :class:`VmmDriver` holds everything else: what
is checked, in which order calls are made, and what is undone when one fails. How both vendors' drivers behave, which
this is built on:

- `*MemUnmap` does not wait for kernels or copies in flight, and takes whole mappings only.
- A mapping is unusable until `*MemSetAccess`; a failure there leaves it mapped, so it is unmapped again here.
- `*MemRelease` of a handle twice, or of no handle, is undefined. So the driver remembers its chunks, and refuses.
- `*MemAddressFree` of a range with mappings in it is not reliably an error. So the driver remembers its mappings, and
  refuses. What is reported by :meth:`VmmDriver.query_chunks` is asked of the vendor's driver all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdkv.errors import DriverError, StateError
from pdkv.memory import _dlpack
from pdkv.memory._books import DriverBooks
from pdkv.memory._vmm_api import VmmApi
from pdkv.memory.driver import MappedChunk, MemoryDriver, MemoryInfo, PhysicalChunk, Progress

if TYPE_CHECKING:
    import torch


# From so many bytes on it is asked first whether they are there, since taking what is left and giving it back would
# disturb others. A small growth step does without that call: the vendor's driver refuses the chunk that does not fit.
_ASK_FIRST_NBYTES = 1 << 30


class _ImportedHandle(int):
    """A handle that equals itself only: importing a chunk of this very process may give the number of its own one."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class VmmDriver(MemoryDriver):
    """The driver contract over a :class:`VmmApi`."""

    def __init__(self, api: VmmApi, device: int, min_granule: int = 1) -> None:
        self.name = api.name
        self.device_id = device
        self._api = api
        with api.on_device():
            self.granule = max(api.granularity(), min_granule)
        self._open = True
        self._books = DriverBooks(self.granule)

    # -- addresses

    def reserve(self, nbytes: int) -> int:
        self._check_open()
        self._books.check_size(nbytes)
        with self._api.on_device():
            address = self._api.address_reserve(nbytes, self.granule)
        self._books.reservations[address] = nbytes
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        self._books.check_unreserve(address, nbytes)
        with self._api.on_device():
            self._api.address_free(address, nbytes)
        del self._books.reservations[address]

    # -- chunks

    def create(self, nbytes: int) -> PhysicalChunk:
        self._check_open()
        self._books.check_size(nbytes)
        with self._api.on_device():
            return self._create_now(nbytes)

    def _create_now(self, nbytes: int) -> PhysicalChunk:
        chunk = PhysicalChunk(self._api.create(nbytes), nbytes)
        self._books.chunks[chunk.handle] = chunk
        return chunk

    def release(self, chunk: PhysicalChunk) -> None:
        self._books.check_chunk(chunk)
        with self._api.on_device():
            self._api.release(int(chunk.handle))
        del self._books.chunks[chunk.handle]

    def export_fd(self, chunk: PhysicalChunk) -> int:
        self._check_open()
        self._books.check_chunk(chunk)
        if "posix_fd" not in self._api.handle_type:
            raise DriverError(
                f"chunks cannot be exported as file descriptors: the driver granted handle type {self._api.handle_type}"
            )
        with self._api.on_device():
            return self._api.export_fd(int(chunk.handle))

    def import_fd(self, fd: int, nbytes: int) -> PhysicalChunk:
        self._check_open()
        self._books.check_size(nbytes)
        with self._api.on_device():
            chunk = PhysicalChunk(_ImportedHandle(self._api.import_fd(fd)), nbytes)
        self._books.chunks[chunk.handle] = chunk
        return chunk

    # -- mappings

    def map(self, address: int, chunk: PhysicalChunk) -> None:
        self._map(address, chunk, read_only=False)

    def map_read_only(self, address: int, chunk: PhysicalChunk) -> None:
        self._map(address, chunk, read_only=True)

    def _map(self, address: int, chunk: PhysicalChunk, *, read_only: bool) -> None:
        self._check_open()
        self._books.check_map(address, chunk)
        with self._api.on_device():
            self._map_now(address, chunk, read_only=read_only)

    def _map_now(self, address: int, chunk: PhysicalChunk, *, read_only: bool = False) -> None:
        api, nbytes = self._api, chunk.nbytes
        api.map(address, nbytes, int(chunk.handle))
        try:
            if read_only:
                api.set_read_access(address, nbytes)
            else:
                api.set_access(*self._access_range(address, nbytes))
        except BaseException:
            api.unmap(address, nbytes)
            raise
        self._books.note_mapped(address, nbytes, read_only=read_only)

    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        """As in the contract. Nothing can be at work on memory that is new at its address, so nothing is waited for
        before it is zeroed; and all of it is waited for once.
        """
        self._check_open()
        self._books.check_back(ranges, progress.chunks)
        missing = progress.missing(ranges)
        if sum(missing) >= _ASK_FIRST_NBYTES:
            self._require_room(sum(missing))
        with self._api.on_device():
            for nbytes in missing:
                progress.chunks.append(self._create_now(nbytes))
            for (address, _), chunk in zip(ranges, progress.chunks, strict=True):
                self._map_now(address, chunk)
                progress.mapped += 1
            for address, nbytes in ranges:
                self._api.start_zero(address, nbytes)
            self._api.finish()

    def unmap(self, address: int, nbytes: int) -> None:
        self._books.check_unmap(address, nbytes)
        with self._api.on_device():
            self._api.synchronize()
            self._api.unmap(address, nbytes)
        self._books.note_unmapped(address)

    def query_chunks(self, address: int, nbytes: int) -> tuple[MappedChunk, ...]:
        """As in the contract. The vendor's driver is asked wherever something was mapped: into a range that this driver
        reserved nobody else maps. Reservations are terabytes; asking at every granule would take seconds.
        """
        found: list[MappedChunk] = []
        with self._api.on_device():
            for start, size in self._books.mapped.overlapping(address, nbytes):
                position = start
                while position < start + size and (mapping := self._api.mapping_at(position)) is not None:
                    found.append(MappedChunk(*mapping))
                    position = found[-1].address + found[-1].nbytes
        return tuple(found)

    def _access_range(self, address: int, nbytes: int) -> tuple[int, int]:
        """The range for which access is granted once `address` has been mapped."""
        return address, nbytes

    # -- contents

    def zero(self, address: int, nbytes: int) -> None:
        self.zero_all([(address, nbytes)])

    def zero_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        """As in the contract. Work that was started earlier, on any stream, comes first, as it would on a CPU."""
        for address, nbytes in ranges:
            self._books.check_writable(address, nbytes)
        if not any(nbytes for _, nbytes in ranges):
            return
        with self._api.on_device():
            self._api.synchronize()
            for address, nbytes in ranges:
                if nbytes:
                    self._api.start_zero(address, nbytes)
            self._api.finish()

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """As in the contract. Work that was started earlier, on any stream, comes first, as it would on a CPU."""
        self._books.check_copy(destination, source, nbytes)
        if nbytes:
            with self._api.on_device():
                self._api.synchronize()
                self._api.start_copy(destination, source, nbytes)
                self._api.finish()

    def tensor(self, address: int, nbytes: int, keepalive: object) -> torch.Tensor:
        self._check_open()
        self._books.check_tensor(address, nbytes)
        try:
            return _dlpack.int8_view(address, nbytes, self._api.dlpack_device, keepalive)
        except (AssertionError, RuntimeError) as error:  # torch without support for the device asserts, or raises this
            raise DriverError(f"torch makes no tensor over memory of the {self.name} driver: {error}") from error

    # -- the rest

    def memory_info(self) -> MemoryInfo:
        with self._api.on_device():
            return self._api.memory_info()

    def synchronize(self) -> None:
        with self._api.on_device():
            self._api.synchronize()

    def describe(self) -> dict[str, str | int | bool]:
        return {
            **super().describe(),
            "handle_type": self._api.handle_type,
            "gpu_direct_rdma": self._api.gpu_direct_rdma,
            "exportable": "posix_fd" in self._api.handle_type,
            **self._api.facts(),
        }

    def close(self) -> None:
        self._open = False
        self._api.close()

    def _check_open(self) -> None:
        if not self._open:
            raise StateError(f"this {self.name} driver is closed; open another one")
