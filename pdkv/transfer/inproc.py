"""A transport between caches of one process, for tests and for engines that share one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from pdkv.errors import TransportError
from pdkv.transfer.base import PostedTransfer, TransportBase
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.shards import HeadSlice
from pdkv.transfer.transport import TransferState

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv.transfer.runs import Copies

_numbers = count()
_registered: WeakValueDictionary[str, InprocTransport] = WeakValueDictionary()


class InprocTransport(TransportBase[str]):
    """Copies by torch, from device to device if need be, when a transfer is polled.

    Args:
        copies_per_poll: so many of a transfer's copies are made at each poll; by default all at the first.
    """

    name = "inproc"
    #: Each poll looks first whether the peer is still registered, and keeps it so until it has moved what it moves;
    #: nothing moves between polls.
    fences = True

    def __init__(self, *, copies_per_poll: int | None = None) -> None:
        super().__init__()
        self.copies_per_poll = copies_per_poll
        self._key = ""
        #: Held by whoever moves bytes of the registered cache, which may be another thread's peer, or takes it back.
        self.registration_lock = Lock()

    @staticmethod
    def find(key: str) -> InprocTransport:
        """The transport that registered under this key and has not unregistered since.

        Raises:
            TransportError: there is none in this process.
        """
        found = _registered.get(key)
        if found is None:
            raise TransportError("the peer is not registered in this process; it has gone, or lives in another one.")
        return found

    def _do_register(self, cache: GrowableKVCache, geometry: CacheGeometry, engine: EngineRef) -> None:
        self._key = f"{engine.engine_id}#{next(_numbers)}"
        _registered[self._key] = self

    def _do_unregister(self) -> None:
        with self.registration_lock:
            _registered.pop(self._key, None)

    def _do_describe(self) -> bytes:
        return self._key.encode()

    def _do_connect(
        self, peer: EngineRef, geometry: CacheGeometry, own: bytes, timeout_s: float, heads: HeadSlice | None
    ) -> str:
        key = own.decode(errors="replace")
        self.find(key)
        return key

    def _do_disconnect(self, connection: Connection[str]) -> None:
        return

    def _do_post(self, connection: Connection[str], pairs: Sequence[BlockPair], *, reads: bool) -> PostedTransfer:
        from pdkv.transfer.runs import copies_for

        ours = self._require_registered()[1]
        sides = (connection.geometry, ours) if reads else (ours, connection.geometry)
        return _InprocTransfer(self, connection, copies_for(*sides, pairs), reads)


class _InprocTransfer(PostedTransfer):
    """Copies that are still to be made."""

    def __init__(self, transport: InprocTransport, connection: Connection[str], copies: Copies, reads: bool) -> None:
        super().__init__(transport, connection, copies.total_nbytes)
        self._mine = transport
        self._left: Iterator[tuple[int, int, int]] = iter(copies)
        self._reads = reads

    @property
    def moves_in_poll(self) -> bool:
        return True

    def abandon(self) -> bool:
        return self.end_abandoned()

    def _look(self) -> TransferState:
        try:
            peer = self._mine.find(self.connection.link)
            with peer.registration_lock:
                self._mine.find(self.connection.link)  # who held the lock may have been taking it back
                return self._move(peer)
        except TransportError as error:
            self.reason = str(error)
            return TransferState.FAILED

    def _move(self, peer: InprocTransport) -> TransferState:
        """What one poll moves. The peer stays registered meanwhile."""
        caches = [self._mine.cache, peer.cache]
        if caches[0] is None or caches[1] is None:
            self.reason = "the cache is not registered any more"
            return TransferState.FAILED
        here, there = caches[0].raw_tensor(), caches[1].raw_tensor()
        source, destination = (there, here) if self._reads else (here, there)
        for number, (begin, to, nbytes) in enumerate(self._left, 1):
            destination[to : to + nbytes].copy_(source[begin : begin + nbytes])
            if number == self._mine.copies_per_poll:
                return TransferState.RUNNING
        caches[0].driver.synchronize()
        return TransferState.DONE
