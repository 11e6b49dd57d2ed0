"""D's side: a peer's memory, mapped here, until one of the two lets go of it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from pdkv.errors import DriverError, ProtocolError, StaleGenerationError, TransferTimeoutError, TransportError
from pdkv.memory import ImportedMemory, MemoryDriver, Piece
from pdkv.transfer.connecting import Steps
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.ipc import wire
from pdkv_connectors.ipc.loop import Loop

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Link:
    """A connection to one P. Made in the engine's thread, then served by the loop's.

    Attributes:
        lock: whoever touches the imported memory, or starts what will, holds it and has seen that `is_open`.
        memories: by number: the cache, its table of sums (where there is one), the board.
    """

    def __init__(self, connection: socket.socket, memories: dict[int, ImportedMemory], peer: EngineRef) -> None:
        self.lock = threading.RLock()
        self.memories = memories
        self.is_open = True
        self._letting_go = threading.Lock()  # whoever comes second returns when all is let go of, not before
        self._peer = peer
        self._connection = connection
        self._drain: Callable[[], None] = lambda: None
        self._loop: Loop | None = None
        self._tickets: dict[int, str | None] = {}
        self._next_ticket = 0

    def serve(self, loop: Loop, drain: Callable[[], None]) -> None:
        """Listen to P from now on. `drain` waits for what still reads the memory; called once it has been closed."""
        self._loop, self._drain = loop, drain
        loop.add(self._connection, self._on_message)

    def require_open(self) -> None:
        """Raise StaleGenerationError where P has taken its memory back, or has gone."""
        if not self.is_open:
            raise StaleGenerationError(
                f"engine {self._peer.engine_id!r} has taken its memory of generation {self._peer.generation} back, or "
                "has ended; handshake again."
            )

    def ask_for(self, group: int, blocks: tuple[int, ...]) -> int | None:
        """Have P finish and sum blocks, at most `wire.MAX_OFFERED_BLOCKS`; the ticket to look for in :meth:`answer`.

        None where P has yet to take what it was asked before: ask again later. A P that hangs keeps nobody waiting.

        Raises:
            StaleGenerationError: P has gone.
        """
        with self.lock:
            self.require_open()
            ticket = self._next_ticket + 1
            try:
                if not wire.send_now(self._connection, wire.Offer(ticket, group, blocks)):
                    return None
            except OSError as error:
                raise StaleGenerationError(f"engine {self._peer.engine_id!r} takes no messages: {error}") from error
            self._next_ticket = ticket
            self._tickets[ticket] = None
        return ticket

    def answer(self, ticket: int) -> str | None:
        """What P said: "" where the blocks are ready, else why not; None as long as it has not answered."""
        with self.lock:
            said = self._tickets.get(ticket)
            if said is None and not self.is_open:
                said = "the peer has taken its memory back, or has ended"
            if said is not None:
                self._tickets.pop(ticket, None)
            return said

    def forget(self, tickets: Sequence[int]) -> None:
        """Nobody looks for these answers any more; they may still come."""
        with self.lock:
            for ticket in tickets:
                self._tickets.pop(ticket, None)

    def close(self) -> None:
        """Let go of the memory, then of the connection. Idempotent; from any thread."""
        self._let_go()
        if self._loop is not None:
            self._loop.close(self._connection)
        else:
            self._connection.close()

    def _on_message(self) -> None:
        if self._connection.fileno() < 0:
            return  # closed since it was found to have something to read
        try:
            received = wire.receive(self._connection)
        except (OSError, ProtocolError, TransportError) as error:
            logger.warning("The ipc connection to engine %r is lost: %s", self._peer.engine_id, error)
            received = None
        message, fds = received if received is not None else (None, ())
        wire.close_all(fds)  # all that P had to hand over is here
        if isinstance(message, wire.Offered):
            with self.lock:
                if message.ticket in self._tickets:
                    self._tickets[message.ticket] = message.problem
            return
        self._let_go()
        if isinstance(message, wire.Drop):
            try:
                wire.send(self._connection, wire.Dropped())
            except OSError as error:
                logger.info(
                    "Engine %r did not wait to hear that its memory is dropped: %s", self._peer.engine_id, error
                )
        elif message is not None:
            logger.warning("Engine %r sent %s, which was not expected.", self._peer.engine_id, type(message).__name__)
        self.close()

    def _let_go(self) -> None:
        with self._letting_go:
            with self.lock:
                was_open, self.is_open = self.is_open, False
            if was_open:
                self._drain()
                for memory in self.memories.values():
                    memory.close()


def open_link(
    address: wire.Address,
    peer: EngineRef,
    me: EngineRef,
    drivers: dict[int, MemoryDriver],
    timeout_s: float,
) -> Steps[Link]:
    """Connect to P and map what it hands over, in steps that do not wait for it.

    Args:
        drivers: what maps each memory.

    Raises:
        TransportError: P is on another machine, is another user's, is not there, or refuses; or its memory cannot be
            mapped here, as that of a card that this one has no peer access to.
        TransferTimeoutError: it did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    connection = _socket_for(address)
    memories: dict[int, ImportedMemory] = {}
    try:
        connection.setblocking(False)
        yield from _waited(lambda: connection.connect("\0" + address.name), deadline)
        wire.require_same_user(connection)
        with suppress(BrokenPipeError, ConnectionResetError):  # it may have said why before it closed the connection
            hello = wire.Hello(wire.VERSION, address.key, me, peer)
            yield from _waited(lambda: wire.send(connection, hello), deadline)
        grants = _Grants()
        try:
            while not grants.complete:
                grants.take((yield from _waited(lambda: _heard(connection), deadline)))
            memories = grants.map(drivers)
        finally:
            grants.close()
        connection.settimeout(timeout_s)
        return Link(connection, memories, peer)
    except BaseException as error:
        connection.close()
        for memory in memories.values():
            memory.close()
        if isinstance(error, TimeoutError) and not isinstance(error, TransferTimeoutError):
            raise TransferTimeoutError(
                f"engine {peer.engine_id!r} did not hand over its memory in {timeout_s} s"
            ) from error
        if isinstance(error, DriverError):
            peer_access = "between two cards it takes peer access (nvidia-smi topo -p2p r); "
            hint = peer_access if drivers[0].name == "cuda" else ""
            raise TransportError(
                f"the memory of engine {peer.engine_id!r} cannot be mapped here: {error}; {hint}use another transport."
            ) from error
        if isinstance(error, OSError):
            raise TransportError(f"engine {peer.engine_id!r} cannot be reached on this machine: {error}") from error
        raise


def _waited(call: Callable[[], T], deadline: float) -> Steps[T]:
    """What a call of a socket that does not block returns in the end. Raises TimeoutError."""
    while True:
        try:
            return call()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("the peer does not answer") from None
        yield


def _heard(connection: socket.socket) -> tuple[wire.Message, tuple[int, ...]] | None:
    """As :func:`wire.receive`, also where P has closed the connection with our words unread: what it said is behind."""
    try:
        return wire.receive(connection)
    except ConnectionResetError:
        return wire.receive(connection)


def _socket_for(address: wire.Address) -> socket.socket:
    try:
        if address.machine == wire.machine_id():
            return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise TransportError(f"no connection to a peer can be opened here: {error}; see `ulimit -n`.") from error
    raise TransportError("the peer is on another machine, whose memory cannot be mapped here; use another transport.")


class _Grants:
    """What P has handed over so far."""

    def __init__(self) -> None:
        self.complete = False
        self._sizes: dict[int, int] = {}
        self._chunks: dict[int, list[tuple[Piece, int]]] = {}

    def take(self, received: tuple[wire.Message, tuple[int, ...]] | None) -> None:
        if received is None:
            raise TransportError("the peer closed the connection before it handed over its memory.")
        message, fds = received
        if isinstance(message, wire.Refuse):
            raise TransportError(f"the peer refuses: {message.reason}")
        if not isinstance(message, wire.Grant) or len(fds) != len(message.pieces):
            wire.close_all(fds)
            raise ProtocolError(f"the peer sent {type(message).__name__} where its memory was expected.")
        self._sizes[message.memory] = message.nbytes
        self._chunks.setdefault(message.memory, []).extend(zip(wire.pieces_of(message), fds, strict=True))
        self.complete = message.last

    def map(self, drivers: dict[int, MemoryDriver]) -> dict[int, ImportedMemory]:
        mapped: dict[int, ImportedMemory] = {}
        try:
            for number, chunks in self._chunks.items():
                mapped[number] = ImportedMemory(drivers[number], self._sizes[number], chunks)
        except BaseException:
            for memory in mapped.values():
                memory.close()
            raise
        return mapped

    def close(self) -> None:
        wire.close_all(tuple(fd for chunks in self._chunks.values() for _, fd in chunks))
        self._chunks = {}
