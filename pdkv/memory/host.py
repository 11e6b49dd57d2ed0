"""Memory of the host: address space from `mmap`, one memfd per chunk, everything else asked of the kernel.

How Linux behaves, which this driver is built on:

- `mmap(PROT_NONE, MAP_NORESERVE)` takes address space and nothing else: 1 TiB in well under a millisecond.
- A memfd has no pages until they are written or `fallocate`d. A write to a page that cannot be had kills the process
  with SIGBUS. So :meth:`HostDriver.create` allocates every page and :meth:`HostDriver.map` fills the page tables
  (`MADV_POPULATE_WRITE`): exhaustion is an error there, never at first touch. Where the kernel lacks
  `MADV_POPULATE_WRITE` (before 5.14), the pages are there all the same and a first touch only fills page tables.
- Fresh pages read as zero. :meth:`HostDriver.back` fills only chunks that somebody may have written before.
- Linux overcommits: near the end of memory it kills a process rather than fail an allocation. So more than
  :meth:`HostDriver.memory_info` calls free is refused before it is tried.
- A memfd's memory is freed when its last descriptor and mapping, in any process, is gone. An exported descriptor is an
  open file of its own, which is how :meth:`HostDriver.is_pinned` can tell that a peer holds a chunk.
- A forked child would share the chunks and pin them. In a child the reservations become empty (`PROT_NONE`) and the
  descriptors are closed; only the process that opened a driver can use it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdkv.errors import ConfigError, DriverError, DriverUnavailableError, OutOfMemoryError, StateError
from pdkv.memory import _dlpack, _host_info, _libc, _memfd
from pdkv.memory._books import DriverBooks
from pdkv.memory.driver import MappedChunk, MemoryDriver, MemoryInfo, PhysicalChunk, Progress

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DEFAULT_GRANULE = 2 << 20
"""2 MiB, CUDA's granule, so that what is tried on the host behaves alike on a GPU."""

_FEWER_CHUNKS = "commit with defragment=True, which leaves one chunk per segment"
# At the limit malloc fails too and the process with it, so this many mappings are left to it. They are counted anew
# when so many may have been made, because counting takes milliseconds.
_SPARE_MAPPINGS = 1024
_EMPTY = _libc.MAP_PRIVATE | _libc.MAP_ANONYMOUS | _libc.MAP_NORESERVE


class HostDriver(MemoryDriver):
    """Host memory in granules of any power of two from the page size up."""

    name = "host"
    device_id = 0

    def __init__(self, granule: int = DEFAULT_GRANULE) -> None:
        """
        Args:
            granule: smallest chunk in bytes.

        Raises:
            ConfigError: the granule is not a power of two of at least one page.
            DriverUnavailableError: this is not Linux, or `/proc` is not mounted.
        """
        page = os.sysconf("SC_PAGE_SIZE")
        if granule < page or granule & (granule - 1):
            raise ConfigError(f"the granule must be a power of two of at least {page} bytes, not {granule}")
        if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/maps"):
            raise DriverUnavailableError("the host driver needs Linux with memfd_create and /proc mounted")
        self.granule = granule
        self._pid = os.getpid()
        self._open = True
        self._populates = True
        self._mappings_left = 0
        self._books = DriverBooks(granule)
        #: Handles of chunks that were neither mapped nor exported so far, so that nobody can have written to them.
        self._untouched: set[int] = set()
        _drivers.add(self)

    # -- addresses

    def reserve(self, nbytes: int) -> int:
        self._check_usable()
        self._books.check_size(nbytes)
        # The kernel aligns to pages only: take one granule more and trim both ends.
        surplus = self.granule if self.granule > os.sysconf("SC_PAGE_SIZE") else 0
        try:
            start = _libc.mmap(None, nbytes + surplus, _libc.PROT_NONE, _EMPTY)
        except OSError as error:
            raise DriverError(
                f"cannot reserve {nbytes} bytes of addresses: {error}; look at `ulimit -v` and vm.max_map_count"
            ) from error
        address = -(-start // self.granule) * self.granule
        if address > start:
            _libc.munmap(start, address - start)
        if start + surplus > address:
            _libc.munmap(address + nbytes, start + surplus - address)
        self._books.reservations[address] = nbytes
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        self._check_process()
        self._books.check_unreserve(address, nbytes)
        # Forgotten first: once the range is unmapped, another thread may be given the same address.
        del self._books.reservations[address]
        try:
            _libc.munmap(address, nbytes)
        except OSError as error:
            self._books.reservations[address] = nbytes
            raise DriverError(f"cannot unreserve {nbytes} bytes at 0x{address:x}: {error}") from error

    # -- chunks

    def create(self, nbytes: int) -> PhysicalChunk:
        self._check_usable()
        self._books.check_size(nbytes)
        self._require_room(nbytes)
        return self._create_now(nbytes)

    def _create_now(self, nbytes: int) -> PhysicalChunk:
        try:
            fd = _memfd.create(nbytes)
        except OSError as error:
            raise self._allocation_error(nbytes, error) from error
        chunk = PhysicalChunk(fd, nbytes)
        self._books.chunks[fd] = chunk
        self._untouched.add(fd)
        return chunk

    def release(self, chunk: PhysicalChunk) -> None:
        self._check_process()
        self._books.check_chunk(chunk)
        del self._books.chunks[chunk.handle]
        self._untouched.discard(chunk.handle)
        os.close(chunk.handle)

    def is_pinned(self, chunk: PhysicalChunk) -> bool | None:
        self._check_process()
        self._books.check_chunk(chunk)
        return _memfd.is_held_elsewhere(chunk.handle)

    def export_fd(self, chunk: PhysicalChunk) -> int:
        self._check_usable()
        self._books.check_chunk(chunk)
        self._untouched.discard(chunk.handle)
        try:
            return _memfd.reopen(chunk.handle)
        except OSError as error:
            raise self._allocation_error(chunk.nbytes, error) from error

    def import_fd(self, fd: int, nbytes: int) -> PhysicalChunk:
        self._check_usable()
        self._books.check_size(nbytes)
        try:
            _memfd.require_chunk(fd, nbytes)
            own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        except ValueError as error:
            raise DriverError(f"cannot import a chunk: {error}") from error
        except OSError as error:
            raise self._allocation_error(nbytes, error) from error
        chunk = PhysicalChunk(own, nbytes)
        self._books.chunks[own] = chunk
        return chunk

    # -- mappings

    def map(self, address: int, chunk: PhysicalChunk) -> None:
        self._map(address, chunk, read_only=False)

    def map_read_only(self, address: int, chunk: PhysicalChunk) -> None:
        self._map(address, chunk, read_only=True)

    def _map(self, address: int, chunk: PhysicalChunk, *, read_only: bool) -> None:
        self._check_usable()
        self._books.check_map(address, chunk)
        self._map_now(address, chunk, read_only=read_only)

    def _map_now(self, address: int, chunk: PhysicalChunk, *, read_only: bool = False) -> None:
        self._check_mapping_count()
        flags = _libc.MAP_SHARED | _libc.MAP_FIXED
        protection = _libc.PROT_READ if read_only else _libc.PROT_READ_WRITE
        try:
            _libc.mmap(address, chunk.nbytes, protection, flags, chunk.handle)
        except OSError as error:
            raise DriverError(f"cannot change a mapping: {error}") from error
        try:
            self._populate(address, chunk.nbytes, _libc.MADV_POPULATE_READ if read_only else _libc.MADV_POPULATE_WRITE)
        except OSError as error:
            _make_empty(address, chunk.nbytes)
            raise self._allocation_error(chunk.nbytes, error) from error
        self._books.note_mapped(address, chunk.nbytes, read_only=read_only)
        self._untouched.discard(chunk.handle)

    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        self._check_usable()
        self._books.check_back(ranges, progress.chunks)
        missing = progress.missing(ranges)
        self._require_room(sum(missing))
        for nbytes in missing:
            progress.chunks.append(self._create_now(nbytes))
        for (address, nbytes), chunk in zip(ranges, progress.chunks, strict=True):
            reads_zero = chunk.handle in self._untouched
            self._map_now(address, chunk)
            progress.mapped += 1
            if not reads_zero:
                ctypes.memset(address, 0, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self._check_process()
        self._books.check_unmap(address, nbytes)
        try:
            _make_empty(address, nbytes)
        except OSError as error:
            raise DriverError(f"cannot change a mapping: {error}") from error
        self._books.note_unmapped(address)

    def query_chunks(self, address: int, nbytes: int) -> tuple[MappedChunk, ...]:
        self._check_process()
        found: list[MappedChunk] = []
        expected_offset = 0
        for part in _host_info.mappings():
            size, last = part.end - part.start, found[-1] if found else MappedChunk(0, 0, 0)
            # Advice for a part (RDMA libraries give some) splits a mapping in two lines; it is still one chunk.
            adjoins = last.address + last.nbytes == part.start and part.file_offset == expected_offset
            if part.inode != 0 and last.ident == part.inode and adjoins:
                found[-1] = MappedChunk(last.address, last.nbytes + size, part.inode)
            elif part.inode != 0:
                found.append(MappedChunk(part.start, size, part.inode))
            expected_offset = part.file_offset + size
        return tuple(c for c in found if c.address < address + nbytes and c.address + c.nbytes > address)

    # -- contents

    def zero(self, address: int, nbytes: int) -> None:
        self._check_process()
        self._books.check_writable(address, nbytes)
        ctypes.memset(address, 0, nbytes)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self._check_process()
        self._books.check_copy(destination, source, nbytes)
        ctypes.memmove(destination, source, nbytes)

    def tensor(self, address: int, nbytes: int, keepalive: object) -> torch.Tensor:
        self._check_usable()
        self._books.check_tensor(address, nbytes)
        return _dlpack.int8_view(address, nbytes, (_dlpack.CPU, 0), keepalive)

    # -- the rest

    def memory_info(self) -> MemoryInfo:
        return _host_info.memory_info()

    def synchronize(self) -> None:
        """Nothing runs behind the CPU's back."""

    def describe(self) -> dict[str, str | int | bool]:
        backing = "fallocate, MADV_POPULATE_WRITE" if self._populates else "fallocate"
        return {**super().describe(), "chunks": "memfd", "backing": backing, "exportable": True}

    def close(self) -> None:
        self._open = False

    # -- helpers

    def _populate(self, address: int, nbytes: int, advice: int) -> None:
        while self._populates:
            try:
                _libc.madvise(address, nbytes, advice)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    logger.info("this kernel has no MADV_POPULATE_WRITE; first touches will fill page tables")
                    self._populates = False
                elif error.errno not in (errno.EINTR, errno.EAGAIN):
                    raise
            else:
                return

    def _allocation_error(self, nbytes: int, error: OSError) -> DriverError:
        if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT):
            return _out_of_memory(nbytes, self.memory_info().free)
        if error.errno == errno.EFBIG:
            return DriverError(
                f"a chunk of {nbytes} bytes is larger than files of this process may be; raise `ulimit -f`"
            )
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return DriverError(f"no file descriptor is left for another chunk; raise `ulimit -n`, or {_FEWER_CHUNKS}")
        return DriverError(f"cannot allocate {nbytes} bytes: {error}")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(f"this host driver belongs to process {self._pid}; open one after the fork")

    def _check_usable(self) -> None:
        self._check_process()
        if not self._open:
            raise StateError("this host driver is closed; open another one")

    def _check_mapping_count(self) -> None:
        if self._mappings_left <= 0:
            allowed = _host_info.max_mappings()
            left = allowed - _host_info.count_mappings() - _SPARE_MAPPINGS
            if left <= 0:
                raise DriverError(
                    f"all but a few of the {allowed} mappings that vm.max_map_count allows exist; raise it, or"
                    f" {_FEWER_CHUNKS}"
                )
            self._mappings_left = min(left, _SPARE_MAPPINGS)
        self._mappings_left -= 2  # one in the middle of a free range makes three of it

    def _abandon(self) -> None:
        """In a forked child: let go of everything, and leave nothing at the addresses that could be touched."""
        for address, nbytes in self._books.reservations.items():
            _make_empty(address, nbytes)
        for fd in self._books.chunks:
            os.close(fd)
        self._books.chunks.clear()


def _make_empty(address: int, nbytes: int) -> None:
    _libc.mmap(address, nbytes, _libc.PROT_NONE, _EMPTY | _libc.MAP_FIXED)


def _out_of_memory(nbytes: int, free: int) -> OutOfMemoryError:
    return OutOfMemoryError(f"host memory is short: {nbytes} bytes wanted, {free} free", wanted=nbytes, free=free)


_drivers: weakref.WeakSet[HostDriver] = weakref.WeakSet()


def _abandon_all() -> None:
    for driver in list(_drivers):
        driver._abandon()


os.register_at_fork(after_in_child=_abandon_all)
