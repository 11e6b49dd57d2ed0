"""The thread of a side channel: all its ZeroMQ sockets are made, used and closed here and nowhere else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator
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
from pdkv.transfer.sidechannel.sockets import Context

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

    def run(self) -> None:
        context: Context = zmq.Context()
        try:
            self._open(context)
            while not self._stopping.is_set():
                self._turn()
            self._send()
        except BaseException as error:
            self.failure = error
            if self.ready.done():
                logger.exception("The side channel of %s has ended by an error.", self._engine_id)
            else:
                self.ready.set_exception(error)
        finally:
            context.destroy()  # each socket lingers as long as its own option says

    def _open(self, context: Context) -> None:
        settings = self._settings
        self._bound = BoundEnd(context, self._engine_id, settings, self._complain) if settings.bind else None
        self._connecting = ConnectingEnd(context, self._engine_id, settings, self._complain, self._clock)
        self._poller = zmq.Poller()
        self._poller.register(self._outgoing.signal.fileno(), zmq.POLLIN)
        address = None
        if self._bound is not None:
            address = self._bind(self._bound)
            for socket in self._bound.sockets():
                self._poller.register(socket, zmq.POLLIN)
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
        self._poller.poll(round(1000 * self._settings.limits.refresh_every_s))
        self._send()
        if self._bound is not None:
            self._take(self._bound.receive())
        self._take(self._connecting.receive())
        self._refresh()
        self._publish()

    def _send(self) -> None:
        for engine_id, frame in self._outgoing.take_all():
            if self._connecting.send(engine_id, frame) or (
                self._bound is not None and self._bound.send(engine_id, frame)
            ):
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
            self._poller.register(socket, zmq.POLLIN)
        for socket in removed:
            self._poller.unregister(socket)
            socket.close()
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
