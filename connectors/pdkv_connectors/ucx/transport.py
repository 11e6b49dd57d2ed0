"""Blocks over UCX's tagged messages, both ends taking part: READ (pull) and WRITE (push).

A peer connects to the other's listener, shows the token of its registration, and asks for bytes by their place in the
cache; the other end checks each range against its committed extents. A run of blocks that is contiguous on both sides
is one message, short runs are packed into messages of some MiB. Everything happens in one thread of the process, so an
engine need not make progress for its peers.

Unlike NIXL's READ, memory is never touched without its owner: there is no registration that could go stale. Bytes are
neither encrypted nor authenticated beyond the token, and the listener takes connections on all addresses of the
machine: for networks whose machines trust each other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from pdkv.errors import PdkvError, TransferTimeoutError, TransportError
from pdkv.transfer.base import PostedTransfer
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection
from pdkv.transfer.connecting import Steps
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.messages import Digest, EngineRef
from pdkv.transfer.runs import copies_for
from pdkv.transfer.shards import HeadSlice
from pdkv.transfer.transport import TransferState
from pdkv.transfer.unpacking import unpack
from pdkv_connectors.checking.keeper import SumKeeper
from pdkv_connectors.checking.transfer import moving
from pdkv_connectors.checking.transport import CheckingTransport
from pdkv_connectors.descriptors import require_to_connect
from pdkv_connectors.ucx.api import describe_ucx
from pdkv_connectors.ucx.link import AskingLink
from pdkv_connectors.ucx.loop import UcxLoop
from pdkv_connectors.ucx.memory import Memory
from pdkv_connectors.ucx.server import Server
from pdkv_connectors.ucx.wire import MAX_COPIES, Ask, Hello

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

START_S = 10.0
STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxSettings:
    """How peers reach this engine.

    Attributes:
        host: the address that peers connect to; of this machine, as they see it.
        port: where to listen; 0 takes a free one.
        options: UCX's settings without ``UCX_``, where the environment does not have them. They count for the process,
            from its first transport on.
    """

    host: str = "127.0.0.1"
    port: int = 0
    options: Mapping[str, str] = field(default_factory=dict)


class _Own(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The transport's part of the metadata."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    token: Digest
    verifies: bool = False


_own_decoder = msgspec.msgpack.Decoder(_Own)


def read_own(own: bytes) -> _Own:
    """Raises ProtocolError where it is not valid."""
    return unpack(_own_decoder, own, "a peer's UCX metadata")


class UcxTransport(CheckingTransport[AskingLink]):
    """See the module's docstring.

    Args:
        verify: have what arrives compared with its owner's sums; see :mod:`pdkv_connectors.checking`. A peer that keeps
            none is refused then.
    """

    name = "ucx"

    def __init__(self, settings: UcxSettings | None = None, *, verify: bool = False) -> None:
        super().__init__(verify=verify)
        self.settings = settings or UcxSettings()
        self._loop = UcxLoop.shared(self.settings.options)
        self._server: Server | None = None
        self._memory: Memory | None = None
        self._port = 0

    def describe_state(self) -> dict[str, Any]:
        return {**super().describe_state(), "port": self._port or None, **describe_ucx(self._loop.ucx)}

    # Registration.

    def _do_register(self, cache: GrowableKVCache, geometry: CacheGeometry, engine: EngineRef) -> None:
        keeper = SumKeeper(cache, geometry, engine, self.counts) if self.verifies else None
        self._keeper, self._memory = keeper, Memory(cache, geometry.extents())
        server = Server(
            self._loop.ucx, self._memory, engine, self.counts, keeper.answer if keeper is not None else None
        )
        try:
            self._port = self._loop.run(server.start(self.settings.port), START_S)
        except PdkvError:
            self._memory = self._keeper = None
            if keeper is not None:
                keeper.close()
            raise
        self._server = server
        self._loop.use(self, self._end)

    def _do_unregister(self) -> None:
        if self._keeper is not None:
            self._keeper.end()  # first, so that whoever sums for a peer ends
        server = self._server
        if server is not None and not self._loop.is_over:  # where it is over the loop has ended the server
            self._loop.run(server.stop("the peer has unregistered its cache"), STOP_S)
        self._loop.leave(self)
        if self._keeper is not None:
            self._keeper.close()
        self._server, self._memory, self._keeper, self._port = None, None, None, 0

    def _do_stop(self, timeout_s: float) -> None:
        """Close the connections; then nothing of a transfer is in flight."""
        running = [moving(transfer) for transfer in self._running]
        futures = [inner.future for inner in running if isinstance(inner, _UcxTransfer)]
        if not self._loop.is_over:
            self._loop.run(self._close_links("the transport was closed"), timeout_s)
        left = concurrent.futures.wait(futures, timeout_s).not_done
        if left:
            raise TransferTimeoutError(f"{len(left)} transfers over UCX have not ended within {timeout_s:g} s.")

    async def _close_links(self, reason: str) -> None:
        for connection in (*self._connections.all(), *self._leaving):
            connection.link.close(reason)

    async def _end(self) -> None:
        """The interpreter exits."""
        await self._close_links("the process exits")
        if self._server is not None:
            await self._server.stop("the process exits")

    # Peers.

    def _do_describe(self) -> bytes:
        if self._server is None:
            raise TransportError("the UCX listener is gone; register() again.")
        return msgspec.msgpack.encode(_Own(self.settings.host, self._port, self._server.token, self.verifies))

    def _do_connect(
        self, peer: EngineRef, geometry: CacheGeometry, own: bytes, timeout_s: float, heads: HeadSlice | None
    ) -> Steps[AskingLink]:
        found = read_own(own)
        self._require_agreed(found.verifies)
        require_to_connect("one more peer of UCX")
        return self._loop.steps(self._open(found), timeout_s, lambda link: self._loop.spawn(link.disconnect()))

    async def _open(self, own: _Own) -> AskingLink:
        link = AskingLink(await self._loop.ucx.create_endpoint(own.host, own.port), verifies=own.verifies)
        try:
            await link.send(Hello(own.token))
            await link.greeted()
        except BaseException:
            link.close("HELLO was not answered")
            raise
        return link

    def _do_disconnect(self, connection: Connection[AskingLink]) -> None:
        if not self._loop.is_over:
            self._loop.spawn(connection.link.disconnect())

    # Transfers.

    def _do_post(
        self, connection: Connection[AskingLink], pairs: Sequence[BlockPair], *, reads: bool
    ) -> PostedTransfer:
        self._require_open(connection)
        return self._post_checked(connection, pairs, reads=reads, peer_verifies=connection.link.verifies)

    def _move(self, connection: Connection[AskingLink], pairs: Sequence[BlockPair], *, reads: bool) -> _UcxTransfer:
        link, memory = self._require_open(connection)
        ours, theirs = self._require_registered()[1], connection.geometry
        copies = copies_for(theirs, ours, pairs) if reads else copies_for(ours, theirs, pairs)
        if len(copies) > MAX_COPIES:
            raise TransportError(f"a transfer takes {len(copies)} copies, {MAX_COPIES} are the most; split it.")
        here, there = (copies.destination, copies.source) if reads else (copies.source, copies.destination)
        offsets, nbytes = (array.astype("<i8").tobytes() for array in (there, copies.nbytes))
        ask = Ask(0, connection.peer, reads, offsets, nbytes)
        work = link.transfer(ask, memory, here, copies.nbytes)
        return _UcxTransfer(self, connection, copies.total_nbytes, self._loop, work)

    def _ask(self, link: AskingLink, body: bytes) -> _UcxAsked:
        return _UcxAsked(self._loop, link.ask(body))

    def _require_open(self, connection: Connection[AskingLink]) -> tuple[AskingLink, Memory]:
        link, memory = connection.link, self._memory
        if link.closed is not None or memory is None:
            raise TransportError(f"the UCX connection to the peer is closed: {link.closed}; handshake again.")
        return link, memory


class _UcxTransfer(PostedTransfer):
    """A task of the loop."""

    def __init__(
        self,
        transport: UcxTransport,
        connection: Connection[AskingLink],
        nbytes: int,
        loop: UcxLoop,
        work: Coroutine[Any, Any, None],
    ) -> None:
        super().__init__(transport, connection, nbytes)
        self.future = loop.spawn(work)

    def _look(self) -> TransferState:
        if not self.future.done():
            return TransferState.RUNNING
        with contextlib.suppress(concurrent.futures.CancelledError, asyncio.CancelledError):
            error = self.future.exception()
            if error is None:
                return TransferState.DONE
            self.reason = str(error) or type(error).__name__
        self.reason = self.reason or "the transport was closed under the transfer"
        return TransferState.FAILED


class _UcxAsked:
    """A question, as a task of the loop."""

    def __init__(self, loop: UcxLoop, work: Coroutine[Any, Any, bytes]) -> None:
        self._future = loop.spawn(work)

    def answer(self) -> bytes | None:
        """None while there is none. Raises TransportError where none will come."""
        if not self._future.done():
            return None
        try:
            return self._future.result()
        except PdkvError:
            raise
        except (Exception, asyncio.CancelledError, concurrent.futures.CancelledError) as error:
            raise TransportError(f"a question was not answered: {str(error) or type(error).__name__}.") from error
