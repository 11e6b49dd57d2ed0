"""The thread of a side channel: makes its ZeroMQ sockets, waits for what arrives, and closes them.

Another thread that sends uses a socket itself, under the lock, where nobody else does just then: what it has to say
need not wait until this thread has woken up and got the interpreter. ZeroMQ allows a socket in one thread after
another, but not in two at a time. So this thread waits by the sockets' descriptors, without using the sockets meanwhile
as zmq_poll() would; and since a descriptor tells once, to whoever uses the socket first, who has sent looks for input.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future

import zmq

from pdkv.errors import ConfigError, ProtocolError
from pdkv.sockets import describe_bind_failure
from pdkv.transfer.clock import Clock
from pdkv.transfer.complaints import Complaints
from pdkv.transfer.counters import Counters
from pdkv.transfer.messages import AnyMessage, Refuse, decode
from pdkv.transfer.sidechannel.addresses import Address
from pdkv.transfer.sidechannel.bound import BoundEnd
from pdkv.transfer.sidechannel.connecting import ConnectingEnd
from pdkv.transfer.sidechannel.peers import PeerEntry
from pdkv.transfer.sidechannel.queues import Inbox, Outgoing
from pdkv.transfer.sidechannel.settings import SideChannelSettings
from pdkv.transfer.sidechannel.sockets import Context, Socket, has_input

logger = logging.getLogger(__name__)


class Loop(threading.Thread):
    """Runs until :meth:`stop`. `ready` becomes the address that is listened on, or the error that prevents it."""

    def __init__(
        self,
        engine_id: str,
        settings: SideChannelSettings,
        inbox: Inbox,
        outgoing: Outgoing,
        clock: Clock,
        counters: Counters,
    ) -> None:
        super().__init__(name=f"pdkv-side-channel-{engine_id[:32]}", daemon=True)
        self.ready: Future[Address | None] = Future()
        self.failure: BaseException | None = None
        #: As in :meth:`pdkv.transfer.carrier.MessageCarrier.call_on_arrival`.
        self.on_arrival: Callable[[], bool] = lambda: False
        self._engine_id = engine_id
        self._settings = settings
        self._inbox = inbox
        self._outgoing = outgoing
        self._clock = clock
        self._complain = Complaints("Side channel", counters, clock, settings.limits.warn_every_s)
        self._counters = counters
        self._stopping = threading.Event()
        self._entries: tuple[PeerEntry, ...] = ()
        self._refresh_at = 0.0
        self._warn_at = 0.0
        self._lock = threading.Lock()  # held by who uses the sockets
        self._sockets: list[Socket] = []  # to wait for; none before they are made and after they are closed
        self._changed = threading.Condition()
        self._state: dict[str, object] = {}
        self._engines: frozenset[str] = frozenset()

    def stop(self) -> None:
        """Send what waits, then end; :meth:`join` waits for it."""
        self._stopping.set()
        self._outgoing.signal.set()

    def state(self) -> dict[str, object]:
        """Peers, for operators."""
        return self._state

    def wait_for(self, engine_id: str, timeout_s: float) -> bool:
        """Whether the engine can be sent to, at the latest after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: engine_id in self._engines, timeout_s)

    def send(self, engine_id: str, frame: bytes) -> bool:
        """From any thread: at once, or, where the sockets are in use, soon. False where there is no room for that."""
        if threading.current_thread() is self or not self._lock.acquire(blocking=False):
            return self._outgoing.put(engine_id, frame)
        try:
            if not self._sockets:
                return self._outgoing.put(engine_id, frame)
            others = self._send_waiting()
            self._send_to(engine_id, frame)
            if others or self._has_input(engine_id):
                self._outgoing.signal.set()
        finally:
            self._lock.release()
        return True

    def run(self) -> None:
        context: Context = zmq.Context()
        try:
            with self._lock:
                self._open(context)
            while not self._stopping.is_set():
                self._turn()
            with self._lock:
                self._send_waiting()
        except BaseException as error:
            self.failure = error
            if self.ready.done():
                logger.exception("The side channel of %s has ended by an error.", self._engine_id)
            else:
                self.ready.set_exception(error)
        finally:
            with self._lock:
                self._sockets = []
            context.destroy()  # each socket lingers as long as its own option says

    def _open(self, context: Context) -> None:
        settings = self._settings
        self._bound = BoundEnd(context, self._engine_id, settings, self._complain) if settings.bind else None
        self._connecting = ConnectingEnd(context, self._engine_id, settings, self._complain, self._clock)
        self._poll = select.poll()
        self._poll.register(self._outgoing.signal.fileno(), select.POLLIN)
        address = None
        if self._bound is not None:
            address = self._bind(self._bound)
            for socket in self._bound.sockets():
                self._listen_to(socket)
        self._refresh()
        self._publish()
        self.ready.set_result(address)

    def _bind(self, bound: BoundEnd) -> Address:
        wanted = self._settings.bind
        assert wanted is not None
        try:
            return bound.bind(wanted)
        except zmq.ZMQError as error:
            text = describe_bind_failure(OSError(error.errno, str(error)), wanted.host, wanted.port, "the side channel")
            raise ConfigError(f"side channel: {text}") from error

    def _turn(self) -> None:
        self._wait()
        with self._lock:
            self._send_waiting()
            ready = {socket for socket in self._sockets if has_input(socket)}
            if self._bound is not None and not ready.isdisjoint(self._bound.sockets()):
                self._take(self._bound.receive())
            self._take(self._connecting.receive(ready))
        if len(self._inbox) and not (self.on_arrival() and not len(self._inbox)):
            self._inbox.announce()
        with self._lock:
            self._send_waiting()
            self._refresh()
            self._publish()

    def _wait(self) -> None:
        """Until something may have come, from a peer or from another thread of this process, or a second is over."""
        with self._lock:
            if any(has_input(socket) for socket in self._sockets):
                return
        self._poll.poll(1000 * self._settings.limits.refresh_every_s)
        self._outgoing.signal.clear()

    def _listen_to(self, socket: Socket) -> None:
        self._sockets.append(socket)
        self._poll.register(socket.getsockopt(zmq.FD), select.POLLIN)  # type: ignore[arg-type]

    def _forget(self, socket: Socket) -> None:
        self._sockets.remove(socket)
        self._poll.unregister(socket.getsockopt(zmq.FD))  # type: ignore[arg-type]
        socket.close()

    def _has_input(self, engine_id: str) -> bool:
        """Whether there is something to receive where this engine is sent to."""
        sockets = [self._connecting.socket_of(engine_id), *(() if self._bound is None else self._bound.sockets())]
        return any(socket is not None and has_input(socket) for socket in sockets)

    def _send_waiting(self) -> bool:
        """What was sent while the sockets were in use. Whether there was anything."""
        waiting = self._outgoing.take_all()
        for engine_id, frame in waiting:
            self._send_to(engine_id, frame)
        return bool(waiting)

    def _send_to(self, engine_id: str, frame: bytes) -> None:
        if self._connecting.send(engine_id, frame) or (self._bound is not None and self._bound.send(engine_id, frame)):
            self._counters.count("sent")
        else:
            self._complain("unroutable", f"a message for {engine_id} was dropped: there is no connection to it")

    def _take(self, frames: Iterator[tuple[str, bytes]]) -> None:
        """Check what peers sent, and hand over what is right."""
        for sender, frame in frames:
            if not self._inbox.has_room(sender, len(frame)):
                self._complain(
                    "inbox_overflows", f"{sender} sends faster than its messages are taken; some are dropped"
                )
                continue
            try:
                message = decode(frame)
                require_own_words(message, sender, self._connecting.were_at(sender))
            except ProtocolError as error:
                self._complain("malformed", f"a message of {sender} was dropped: {error}")
                continue
            self._counters.count("received")
            self._inbox.put(sender, message, len(frame))

    def _refresh(self) -> None:
        """Once a second: who may connect, whom to connect to, whom to introduce to, and what to say of it."""
        now = self._clock.monotonic()
        self._connecting.introduce(now)
        if now < self._refresh_at:
            return
        self._refresh_at = now + self._settings.limits.refresh_every_s
        entries = self._ask_for_peers()
        if self._bound is not None:
            self._bound.allow(entries)
        added, removed = self._connecting.connect(entries)
        for socket in added:
            self._listen_to(socket)
        for socket in removed:
            self._forget(socket)
        self._warn(now)

    def _ask_for_peers(self) -> tuple[PeerEntry, ...]:
        """The peer book's; those from before where it fails, which may be somebody else's registry."""
        try:
            self._entries = tuple(self._settings.peers.entries())
        except Exception as error:
            self._complain("peers_unknown", f"the peer book failed, so the peers stay as they were: {error!r}")
        return self._entries

    def _publish(self) -> None:
        """Let other threads know who is there."""
        guests = [] if self._bound is None else self._bound.guests.names()
        state: dict[str, object] = {"guests": guests, "hosts": self._connecting.describe()}
        if state != self._state:
            with self._changed:
                self._state, self._engines = state, frozenset(guests) | self._connecting.engines()
                self._changed.notify_all()

    def _warn(self, now: float) -> None:
        if not self._settings.insecure or now < self._warn_at:
            return
        self._warn_at = now + self._settings.limits.warn_every_s
        self._counters.count("insecure_warnings")
        logger.warning(
            "The side channel of %s has no keys (--insecure-side-channel): whoever reaches it can end requests and "
            "read what is said. Make keys with `python -m pdkv.keys make FILE`.",
            self._engine_id,
        )


def require_own_words(message: AnyMessage, sender: str, were_at: Collection[str]) -> None:
    """A connection speaks for its engine, and for engines that were at its address before only to say that they left.

    Args:
        were_at: engine ids that have answered at the sender's address.

    Raises:
        ProtocolError: it says something in another's name.
    """
    if message.sender.engine_id != sender:
        raise ProtocolError(f"it names {message.sender.engine_id!r} as its sender, which is another engine.")
    if isinstance(message, Refuse) and message.meant.engine_id != sender and message.meant.engine_id not in were_at:
        raise ProtocolError(
            f"it refuses what was meant for {message.meant.engine_id!r}, which was never at its address."
        )
