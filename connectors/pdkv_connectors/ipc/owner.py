"""P's side: hands its memory to peers that may have it, and takes it back."""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from pdkv.errors import PdkvError, TransportError
from pdkv.memory import Piece
from pdkv.transfer.clock import SystemClock
from pdkv.transfer.complaints import Complaints
from pdkv.transfer.counters import Counters
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.ipc import wire
from pdkv_connectors.ipc.loop import Loop

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 2.0
_BACKLOG = 64
#: Where no connection can be taken: descriptors or memory must become free first, and the listener stays readable.
ACCEPT_PAUSE_S = 0.1
_WARN_EVERY_S = 60.0
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


class GrantedMemory:
    """What one of P's memories is made of: its size, and its chunks with descriptors that this object owns."""

    def __init__(self, nbytes: int, chunks: Sequence[tuple[Piece, int]]) -> None:
        self.nbytes = nbytes
        self.chunks = tuple(chunks)

    def grants(self, memory: int, last: bool) -> list[tuple[wire.Grant, tuple[int, ...]]]:
        """Messages that hand it over, each with its descriptors."""
        parts = [self.chunks[first : first + wire.MAX_FDS] for first in range(0, len(self.chunks), wire.MAX_FDS)]
        return [
            (
                wire.Grant(
                    memory,
                    self.nbytes,
                    tuple((piece.offset, piece.nbytes) for piece, _ in part),
                    last and number == len(parts) - 1,
                ),
                tuple(fd for _, fd in part),
            )
            for number, part in enumerate(parts)
        ]

    def close(self) -> None:
        """Close the descriptors, which pin the memory. Idempotent."""
        wire.close_all(tuple(fd for _, fd in self.chunks))
        self.chunks = ()


class Owner:
    """Listens on a Unix socket for as long as one registration lives.

    Args:
        loop: runs it.
        engine: P in the generation that is handed out.
        memories: the cache, its table of sums (where there is one), the board.
        offer: makes blocks of a KV-cache group ready to be read, called in the loop's thread; see `sums`.
        counters: `accepts_failed`, for one.
    """

    def __init__(
        self,
        loop: Loop,
        engine: EngineRef,
        memories: dict[int, GrantedMemory],
        offer: Callable[[int, Sequence[int]], None],
        counters: Counters,
    ) -> None:
        self.engine = engine
        self._loop = loop
        self._memories = memories
        self._offer = offer
        self._complain = Complaints("ipc", counters, SystemClock(), _WARN_EVERY_S)
        self._peers: dict[socket.socket, str] = {}
        self._changed = threading.Condition()
        self._dropping = False
        self._spare = -1
        machine = wire.machine_id()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"pdkv-ipc-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener.bind("\0" + name)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)  # who asked may have gone before he is let in
        try:
            self._spare = _open_spare()
        except OSError:
            self._listener.close()
            raise
        verifies = 1 in memories
        self.address = wire.Address(wire.VERSION, machine, name, secrets.token_bytes(wire.KEY_NBYTES), verifies)
        loop.add(self._listener, self._accept)

    @property
    def num_peers(self) -> int:
        """Peers that hold the memory."""
        return len(self._peers)

    def drop_all(self, timeout_s: float) -> list[str]:
        """Let every peer drop the memory, and take no new ones; who has not said in time that it did."""
        self._loop.close(self._listener)
        with self._changed:
            self._dropping = True
            for connection in list(self._peers):
                try:
                    wire.send(connection, wire.Drop())
                except OSError:
                    self._forget(connection)
            self._changed.wait_for(lambda: not self._peers, timeout_s)
            left = sorted(self._peers.values())
            for connection in list(self._peers):
                self._forget(connection)
        for memory in self._memories.values():
            memory.close()
        self._give_spare()
        return left

    def _accept(self) -> None:
        try:
            self._accept_one()
        finally:
            self._keep_spare()

    def _accept_one(self) -> None:
        """Let one in. Whatever prevents that must not keep everybody out for good."""
        if self._listener.fileno() < 0:
            return  # closed since it was found to have something to read
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NONE_LEFT and self._tell_that_none_is_left(error):
                return
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                self._loop.rest(self._listener, ACCEPT_PAUSE_S)
            self._complain("accepts_failed", f"a peer could not be let in, it is tried again: {error}")
            return
        connection.settimeout(_SEND_TIMEOUT_S)
        try:
            wire.require_same_user(connection)  # at once: a stranger who says nothing must not hold a descriptor
        except (TransportError, OSError) as error:
            self._turn_away(connection, str(error))
            return
        self._loop.add(connection, partial(self._serve, connection))

    def _tell_that_none_is_left(self, error: OSError) -> bool:
        """By the descriptor that is kept for this, so that a peer need not wait for its deadline to hear nothing.

        Whether somebody was told; not where another thread has taken that one meanwhile.
        """
        self._give_spare()
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return False
        with connection, suppress(OSError):
            connection.setblocking(False)
            reason = "no file descriptor is left on its side to let a peer in; raise `ulimit -n` there"
            wire.send(connection, wire.Refuse(reason))
        self._complain("accepts_failed", f"a peer was not let in, and was told so: {error}")
        return True

    def _keep_spare(self) -> None:
        with self._changed, suppress(OSError):  # another thread was faster: it is tried again at the next peer
            if self._spare < 0 and not self._dropping:
                self._spare = _open_spare()

    def _give_spare(self) -> None:
        with self._changed:
            spare, self._spare = self._spare, -1
            if spare >= 0:
                os.close(spare)

    def _serve(self, connection: socket.socket) -> None:
        """One message of a peer; whatever goes wrong concerns this peer alone."""
        try:
            received = wire.receive(connection)
            if received is None or isinstance(received[0], wire.Dropped):
                self._forget(connection)
            elif isinstance(received[0], wire.Hello) and connection not in self._peers:
                self._hand_over(connection, received[0])
            elif isinstance(received[0], wire.Offer) and connection in self._peers:
                self._make_ready(connection, received[0])
            else:
                wire.close_all(received[1])
                self._turn_away(connection, f"{type(received[0]).__name__} was not expected now")
        except PdkvError as error:
            self._turn_away(connection, str(error))
        except OSError as error:
            logger.info("An ipc peer has gone: %s", error)
            self._forget(connection)

    def _hand_over(self, connection: socket.socket, hello: wire.Hello) -> None:
        if not hmac.compare_digest(hello.key, self.address.key):
            self._turn_away(connection, "the key is not the one of the handshake")
            return
        if hello.version != wire.VERSION or hello.wanted != self.engine:
            found = f"engine {self.engine.engine_id!r} in generation {self.engine.generation}"
            self._turn_away(connection, f"this is {found}, ipc version {wire.VERSION}; handshake again")
            return
        with self._changed:
            if self._dropping:
                self._turn_away(connection, "its memory is going away")
                return
            self._peers[connection] = hello.sender.engine_id
            last = max(self._memories)
            for memory, granted in self._memories.items():
                for grant, fds in granted.grants(memory, memory == last):
                    wire.send(connection, grant, fds)

    def _make_ready(self, connection: socket.socket, message: wire.Offer) -> None:
        problem = ""
        try:
            self._offer(message.group, message.blocks)
        except PdkvError as error:
            problem = str(error)[:512]
        wire.send(connection, wire.Offered(message.ticket, problem))

    def _turn_away(self, connection: socket.socket, reason: str) -> None:
        logger.warning("An ipc peer is turned away: %s", reason)
        try:
            wire.send(connection, wire.Refuse(reason[:512]))
        except OSError as error:
            logger.info("It did not hear why: %s", error)
        self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._changed:
            self._peers.pop(connection, None)
            self._changed.notify_all()
        self._loop.close(connection)


def _open_spare() -> int:
    """A descriptor to be given up where none is left. Raises OSError."""
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
