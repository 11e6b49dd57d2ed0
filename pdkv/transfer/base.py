"""What transports share: registration, peers, checks before posting, transfers that run, and their counts.

A transport derives from :class:`TransportBase` and does the moving in the methods whose names begin with ``_do_``.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pdkv.errors import GeometryError, PdkvError, StateError, TransportError
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection, Connections, require_pairs
from pdkv.transfer.connecting import Steps
from pdkv.transfer.first_error import FirstError
from pdkv.transfer.fit import model_difference, require_same_bytes
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.metadata import Metadata, read_metadata, write_metadata
from pdkv.transfer.shards import HeadSlice
from pdkv.transfer.stepped import SteppedTransport
from pdkv.transfer.transport import Transfer, TransferState

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

logger = logging.getLogger(__name__)

L = TypeVar("L")  # what a transport keeps of a peer


class PostedTransfer(Transfer):
    """A transfer of a :class:`TransportBase`; subclasses say in :meth:`_look` how it stands."""

    def __init__(self, transport: TransportBase[Any], connection: Connection[Any], nbytes: int) -> None:
        self.connection = connection
        self.nbytes = nbytes
        self._transport = transport
        self._state = TransferState.RUNNING

    def poll(self) -> TransferState:
        if self._state is TransferState.RUNNING:
            self._transport.require_process()
            state = self._look()
            if state is not TransferState.RUNNING:
                self.end(state, self.reason)
        return self._state

    def look(self) -> TransferState:
        """As :meth:`poll`, for whoever has this transfer as a part of another one: the transport hears of that one."""
        return self._look()

    def end_abandoned(self) -> bool:
        """For :meth:`abandon`, where nothing of the transfer is in flight: it ends now."""
        self._transport.counts["abandoned"] += 1
        self.end(TransferState.FAILED, "it was abandoned")
        return True

    def abandon(self) -> bool:
        self._transport.counts["abandoned"] += 1
        return self.poll() is not TransferState.RUNNING

    def end(self, state: TransferState, reason: str = "") -> None:
        """It has ended, for certain: nothing of it touches memory any more."""
        if self._state is TransferState.RUNNING:
            self._state, self.reason = state, reason
            self._transport.transfer_ended(self)

    @abstractmethod
    def _look(self) -> TransferState:
        """The state now, without waiting. Where it is FAILED, :attr:`reason` has been set."""


class TransportBase(SteppedTransport, Generic[L]):
    """See the module's docstring. `geometry` is this cache's, while one is registered."""

    can_read = True
    can_write = True
    converts = False
    #: Whether READs from every peer that is connected are fenced, as :meth:`Transport.fences_reads` means it.
    fences = False

    def __init__(self) -> None:
        super().__init__()
        self.engine: EngineRef | None = None
        self.geometry: CacheGeometry | None = None
        self.cache: GrowableKVCache | None = None
        #: By what happened: reads, writes, bytes, failed, abandoned, connects, refused.
        self.counts: Counter[str] = Counter()
        self._connections: Connections[L] = Connections()
        self._running: set[PostedTransfer] = set()
        self._leaving: list[Connection[L]] = []
        self._closed = False
        self._pid = os.getpid()

    # For subclasses to do. A failed one leaves everything as it was.

    @abstractmethod
    def _do_register(self, cache: GrowableKVCache, geometry: CacheGeometry, engine: EngineRef) -> None:
        """Register each extent."""

    @abstractmethod
    def _do_unregister(self) -> None:
        """Undo :meth:`_do_register`, peers being disconnected; when it returns nobody reaches the memory."""

    @abstractmethod
    def _do_describe(self) -> bytes:
        """The transport's own part of the metadata."""

    @abstractmethod
    def _do_connect(
        self, peer: EngineRef, geometry: CacheGeometry, own: bytes, timeout_s: float, heads: HeadSlice | None
    ) -> L | Steps[L]:
        """What is to be kept of a peer that fits; where that is to be waited for, the steps to it, which never wait.

        `heads` is None unless the transport converts.
        """

    @abstractmethod
    def _do_disconnect(self, connection: Connection[L]) -> None:
        """Let go of a peer; no transfer with it runs. A new connection with the engine may have been added already.

        Called again later where it failed.
        """

    @abstractmethod
    def _do_post(self, connection: Connection[L], pairs: Sequence[BlockPair], *, reads: bool) -> PostedTransfer:
        """Start to move pairs that were checked."""

    def _do_stop(self, timeout_s: float) -> None:
        """End, by force, what still runs; :meth:`close` calls it, and then ends the transfers as failed.

        Raises:
            TransferTimeoutError: it has not ended in time, and may still touch memory.
        """
        return

    # The contract.

    def register(
        self, cache: GrowableKVCache, engine: EngineRef, *, groups: Sequence[Sequence[str]] | None = None
    ) -> None:
        if self._closed:
            raise StateError(f"the {self.name} transport is closed; make a new one.")
        self.require_process()
        if self.engine is not None:
            raise StateError(f"the {self.name} transport has registered a cache already; unregister() it first.")
        geometry = CacheGeometry.of(cache, groups)
        self._do_register(cache, geometry, engine)
        self.cache, self.engine, self.geometry = cache, engine, geometry

    def unregister(self) -> None:
        if self.engine is None:
            return
        self.require_process()
        self._poll_running()
        if self._running:
            raise StateError(
                f"{len(self._running)} transfers of the {self.name} transport still run; wait until they have ended, "
                "or close() it."
            )
        with FirstError() as errors:
            self._drop_everything(errors)

    def describe(self) -> bytes:
        engine, geometry = self._require_registered()
        return write_metadata(Metadata(self.name, engine, geometry.encode(), self._do_describe()))

    def _meet(self, peer: EngineRef, metadata: bytes, timeout_s: float, heads: HeadSlice | None) -> Steps[None]:
        ours = self._require_registered()[1]
        try:
            geometry, own = self._read_metadata(peer, metadata)
            self._require_fit(ours, geometry)
            if heads is not None and not self.converts:
                raise GeometryError(
                    f"the {self.name} transport moves all heads of a page; use one that converts (ipc)."
                )
            self._connections.require_not_older(peer)
            link = self._do_connect(peer, geometry, own, timeout_s, heads)
            connection = Connection(peer, geometry, (yield from link) if isinstance(link, Generator) else link)
        except PdkvError:
            self.counts["refused"] += 1
            raise
        before = self._connections.drop(peer.engine_id)
        self._connections.add(connection)
        self.counts["connects"] += 1
        if before is not None:
            self._leaving.append(before)
            self._let_go(FirstError())

    def disconnect(self, engine_id: str) -> None:
        self.require_process()
        self._attempts.abandon(engine_id)
        with FirstError() as errors:
            self._disconnect(engine_id, errors)

    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return self._post(peer, pairs, reads=True)

    def write(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return self._post(peer, pairs, reads=False)

    def fences_reads(self, peer: EngineRef) -> bool:
        known = self._connections.find(peer.engine_id)
        return self.fences and known is not None and known.peer == peer

    def describe_state(self) -> dict[str, Any]:
        geometry = self.geometry
        extents = geometry.extents() if geometry is not None else ()
        return {
            "transport": self.name,
            "registered": geometry is not None,
            "generation": self.engine.generation if self.engine is not None else None,
            "extents": len(extents),
            "registered_nbytes": sum(extent.nbytes for extent in extents),
            "peers": [connection.peer.engine_id for connection in self._connections.all()],
            "running": len(self._running),
            **dict(self.counts),
        }

    def close(self, *, timeout_s: float = 5.0) -> None:
        if self._closed and self.engine is None and not self._running and not self._leaving:
            return
        self.require_process()
        self._closed = True
        with FirstError() as errors:
            errors.attempt("look at the transfers that run", self._poll_running)
            if self._running and errors.attempt("stop what runs", partial(self._do_stop, timeout_s)):
                for transfer in list(self._running):
                    transfer.end(TransferState.FAILED, "the transport was closed under the transfer")
            self._drop_everything(errors)

    # Parts.

    def require_process(self) -> None:
        """Refuse a forked child: its peers, connections and memory are its parent's, who would lose them.

        Raises:
            StateError: this is one.
        """
        if os.getpid() != self._pid:
            raise StateError(f"this {self.name} transport belongs to process {self._pid}; make one after the fork.")

    def transfer_ended(self, transfer: PostedTransfer) -> None:
        """Called by a transfer, once."""
        self._running.discard(transfer)
        if transfer.poll() is TransferState.FAILED:
            self.counts["failed"] += 1
            logger.warning("A %s transfer of %d bytes failed: %s", self.name, transfer.nbytes, transfer.reason)
        else:
            self.counts["bytes"] += transfer.nbytes
        if self._leaving:
            self._let_go(FirstError())

    def _post(self, peer: EngineRef, pairs: Sequence[BlockPair], *, reads: bool) -> Transfer:
        ours = self._require_registered()[1]
        if not (self.can_read if reads else self.can_write):
            raise TransportError(f"the {self.name} transport cannot {'read' if reads else 'write'}; use another one.")
        connection = self._connections.get(peer)
        source, destination = (connection.geometry, ours) if reads else (ours, connection.geometry)
        self._check_pairs(connection, pairs, source, destination)
        transfer = self._do_post(connection, pairs, reads=reads)
        self.counts["reads" if reads else "writes"] += 1
        self._running.add(transfer)
        return transfer

    def _check_pairs(
        self, connection: Connection[L], pairs: Sequence[BlockPair], source: CacheGeometry, destination: CacheGeometry
    ) -> None:
        """Raise ProtocolError where pairs cannot be posted; a transport that counts otherwise overrides this."""
        require_pairs(pairs, source, destination)

    def _require_registered(self) -> tuple[EngineRef, CacheGeometry]:
        self.require_process()
        if self.engine is None or self.geometry is None:
            raise StateError(f"no cache is registered with the {self.name} transport; register() one first.")
        return self.engine, self.geometry

    def _read_metadata(self, peer: EngineRef, metadata: bytes) -> tuple[CacheGeometry, bytes]:
        return read_metadata(metadata, self.name, peer)

    def _require_fit(self, ours: CacheGeometry, theirs: CacheGeometry) -> None:
        if not self.converts:
            require_same_bytes(ours, theirs)
        elif (difference := model_difference(ours, theirs)) is not None:
            raise GeometryError(f"{difference} Run the same model with the same grouping on both sides.")

    def _poll_running(self) -> None:
        for transfer in list(self._running):
            transfer.poll()

    def _disconnect(self, engine_id: str, errors: FirstError) -> None:
        connection = self._connections.drop(engine_id)
        if connection is not None:
            self._leaving.append(connection)
            self._let_go(errors)

    def _let_go(self, errors: FirstError) -> None:
        """Disconnect those who are to go and with whom nothing runs any more; who cannot be let go of stays to go."""
        busy = {id(transfer.connection) for transfer in self._running}
        leaving, self._leaving = self._leaving, []
        for connection in leaving:
            what = f"let go of engine {connection.peer.engine_id!r}"
            if id(connection) in busy or not errors.attempt(what, partial(self._do_disconnect, connection)):
                self._leaving.append(connection)

    def _drop_everything(self, errors: FirstError) -> None:
        """Peers and registration, each also where another one fails; what failed can be tried again."""
        self._attempts.abandon_all()
        for connection in self._connections.all():
            self._disconnect(connection.peer.engine_id, errors)
        self._let_go(errors)
        if self.engine is not None and errors.attempt(f"unregister the cache from {self.name}", self._do_unregister):
            self.cache = self.engine = self.geometry = None
