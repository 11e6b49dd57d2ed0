"""Bytes of a cache as UCX sends and receives them: one message per long run, short runs packed together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdkv.errors import ProtocolError
from pdkv.transfer.geometry import ByteRange
from pdkv_connectors.native import find_kernels, streams
from pdkv_connectors.ucx.wire import Array

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

#: A run of at least this many bytes is a message by itself, sent from and received in place; a message costs some
#: 50 µs in each process, which is what copying this much costs.
DIRECT_NBYTES = 512 * 1024
#: Shorter ones are gathered into messages of about this size, so that copying and sending overlap.
PACKED_NBYTES = 4 * 2**20


class Part(NamedTuple):
    """Copies ``first..last - 1`` of a transfer, one message of `nbytes`. Both ends cut a transfer alike."""

    first: int
    last: int
    nbytes: int

    @property
    def is_packed(self) -> bool:
        return self.last - self.first > 1 or self.nbytes < DIRECT_NBYTES


def parts_of(nbytes: Array) -> Iterator[Part]:
    """The messages of a transfer whose copies have these sizes."""
    first = packed = 0
    for index, size in enumerate(nbytes.tolist()):
        if size >= DIRECT_NBYTES or packed + size > PACKED_NBYTES:
            if packed:
                yield Part(first, index, packed)
            first, packed = index, 0
        if size >= DIRECT_NBYTES:
            yield Part(index, index + 1, size)
            first = index + 1
        else:
            packed += size
    if packed:
        yield Part(first, len(nbytes), packed)


class Memory:
    """A registered cache, by offsets from its base."""

    def __init__(self, cache: GrowableKVCache, extents: tuple[ByteRange, ...]) -> None:
        self._raw: Any = cache.raw_tensor()
        self._driver = cache.driver
        self._on_host = self._raw.device.type == "cpu"
        self._kernels = find_kernels() if self._on_host else None
        if self._on_host:
            self._raw = self._raw.numpy().view(np.uint8)
        self._begins = np.array([extent.offset for extent in extents], np.int64)
        self._ends = self._begins + np.array([extent.nbytes for extent in extents], np.int64)

    def require_committed(self, offsets: Array, nbytes: Array) -> None:
        """Refuse what is not within one extent (I5, I6): a peer named it.

        Raises:
            ProtocolError: something is not.
        """
        found = np.searchsorted(self._begins, offsets, side="right") - 1
        outside = int(np.sum((found < 0) | (offsets + nbytes > self._ends[found])))
        if outside:
            raise ProtocolError(f"{outside} range(s) are not within one committed extent; handshake again.")

    def ready(self) -> None:
        """What was copied so far may be sent, or used."""
        if not self._on_host:
            self._driver.synchronize()

    def outgoing(self, part: Part, offsets: Array, nbytes: Array) -> Any:
        """A buffer that holds the part's bytes."""
        if not part.is_packed:
            return self._at(int(offsets[part.first]), part.nbytes)
        buffer = self._staging(part.nbytes)
        if self._kernels is not None:
            within, places, sizes = self._addresses(buffer, part, offsets, nbytes)
            self._kernels.copy_runs(within, places, sizes, streams=streams(part.nbytes))
            return buffer
        for at, offset, size in _pieces(part, offsets, nbytes):
            self._copy(buffer[at : at + size], self._at(offset, size))
        self.ready()
        return buffer

    def incoming(self, part: Part, offsets: Array) -> Any:
        """A buffer for the part's bytes: where they belong, or one to be unpacked."""
        return self._staging(part.nbytes) if part.is_packed else self._at(int(offsets[part.first]), part.nbytes)

    def unpack(self, buffer: Any, part: Part, offsets: Array, nbytes: Array) -> None:
        """Put what has arrived where it belongs, if it is not there yet."""
        if not part.is_packed:
            return
        if self._kernels is not None:
            within, places, sizes = self._addresses(buffer, part, offsets, nbytes)
            self._kernels.copy_runs(places, within, sizes, streams=streams(part.nbytes))
            return
        for at, offset, size in _pieces(part, offsets, nbytes):
            self._copy(self._at(offset, size), buffer[at : at + size])

    def _at(self, offset: int, nbytes: int) -> Any:
        return self._raw[offset : offset + nbytes]

    def _staging(self, nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8) if self._on_host else self._raw.new_empty(nbytes)

    def _addresses(self, buffer: Any, part: Part, offsets: Array, nbytes: Array) -> tuple[Array, Array, Array]:
        """Of each copy in its message, in the cache, and its size. Offsets were checked (:meth:`require_committed`)."""
        sizes = np.ascontiguousarray(nbytes[part.first : part.last])
        within = np.cumsum(sizes) - sizes + buffer.ctypes.data
        return within, offsets[part.first : part.last] + self._raw.ctypes.data, sizes

    def _copy(self, to: Any, source: Any) -> None:
        if self._on_host:
            to[:] = source
        else:
            to.copy_(source)


def _pieces(part: Part, offsets: Array, nbytes: Array) -> Iterator[tuple[int, int, int]]:
    """Where each copy of a part begins in its message, its offset in the cache, and its size."""
    at = 0
    sizes = nbytes[part.first : part.last].tolist()
    for offset, size in zip(offsets[part.first : part.last].tolist(), sizes, strict=True):
        yield at, offset, size
        at += size
