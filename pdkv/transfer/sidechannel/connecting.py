"""The end of a side channel that connects: a DEALER to each address of the peer book."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence

import zmq

from pdkv.errors import ConfigError, ProtocolError
from pdkv.transfer.clock import Clock
from pdkv.transfer.complaints import Complaints
from pdkv.transfer.sidechannel.hello import SUPPORTED, Accepted, Declined, Hello, decode_hello, encode_hello, is_hello
from pdkv.transfer.sidechannel.links import Host
from pdkv.transfer.sidechannel.peers import PeerEntry
from pdkv.transfer.sidechannel.settings import SideChannelSettings
from pdkv.transfer.sidechannel.sockets import Context, Socket, connecting_socket, monitor_of, next_event

MAX_READ = 256


class ConnectingEnd:
    """Belongs to the thread that makes it."""

    def __init__(
        self, context: Context, engine_id: str, settings: SideChannelSettings, complain: Complaints, clock: Clock
    ) -> None:
        self._context = context
        self._engine_id = engine_id
        self._settings = settings
        self._complain = complain
        self._clock = clock
        self._hosts: dict[PeerEntry, Host] = {}
        self._by_engine: dict[str, Host] = {}

    def connect(self, entries: Sequence[PeerEntry]) -> tuple[list[Socket], list[Socket]]:
        """Connect to these peers and no others; sockets to poll from now on, and sockets to poll no more and close."""
        wanted = {entry for entry in entries if entry.address is not None and self._is_usable(entry)}
        removed = [host for entry, host in self._hosts.items() if entry not in wanted]
        for host in removed:
            del self._hosts[host.entry]
            self._forget(host)
            host.socket.disable_monitor()
        added = [self._add(entry) for entry in sorted(wanted - self._hosts.keys(), key=str)]
        return _sockets([host for host in added if host is not None]), _sockets(removed)

    def send(self, engine_id: str, frame: bytes) -> bool:
        """Whether the frame is on its way to a host."""
        host = self._by_engine.get(engine_id)
        if host is None or not host.accepted:
            return False
        try:
            host.send(frame)
        except zmq.Again:
            self._complain("peer_queue_full", f"a message was dropped: {host.entry.name} takes none")
            return False
        return True

    def socket_of(self, engine_id: str) -> Socket | None:
        """By which this engine is sent to; None where it is not connected to."""
        host = self._by_engine.get(engine_id)
        return None if host is None else host.socket

    def receive(self, ready: Container[object]) -> Iterator[tuple[str, bytes]]:
        """Sender and frame of each message of a host; connections and introductions are dealt with on the way.

        Args:
            ready: the sockets, of all there are, that have something.
        """
        for host in tuple(self._hosts.values()):
            if host.monitor in ready:
                self._look(host)
            if host.socket not in ready:
                continue
            for _ in range(MAX_READ):
                try:
                    frames = host.socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if len(frames) != 1:
                    self._complain("malformed", f"a message of {len(frames)} parts was dropped; there must be one")
                elif is_hello(frames[0]):
                    self._answered(host, frames[0])
                elif host.accepted:
                    yield host.engine_ids[-1], frames[0]
                else:
                    self._complain("unintroduced", "a message from someone who has not answered HELLO was dropped")

    def introduce(self, now: float) -> None:
        """Say HELLO to those who are connected and have not answered."""
        for host in self._hosts.values():
            if host.introduce_at > now or host.accepted or not (host.connected or host.refused):
                continue
            host.introduce_at = now + self._settings.limits.introduce_every_s
            if host.refused:
                host.connect_again()
                continue
            try:
                host.send(encode_hello(Hello(engine_id=self._engine_id, versions=SUPPORTED)))
            except zmq.Again:
                self._complain("peer_queue_full", f"HELLO could not be sent: {host.entry.name} takes nothing")

    def describe(self) -> dict[str, str]:
        """For each peer the engine that answers there, or why none does."""
        return {
            f"{host.entry.name} at {host.entry.address}": host.engine_ids[-1] if host.accepted else host.reason
            for host in self._hosts.values()
        }

    def engines(self) -> frozenset[str]:
        """Who can be sent to."""
        return frozenset(host.engine_ids[-1] for host in self._hosts.values() if host.accepted)

    def were_at(self, engine_id: str) -> Collection[str]:
        """Engines that have answered at the same address as this one."""
        host = self._by_engine.get(engine_id)
        return () if host is None else host.engine_ids

    def _is_usable(self, entry: PeerEntry) -> bool:
        try:
            self._settings.require_usable(entry)
        except ConfigError as error:
            self._complain("unsafe_peers", str(error))
            return False
        return True

    def _add(self, entry: PeerEntry) -> Host | None:
        """None where there is no socket for it now (no descriptor left, for one); it is wanted again in a second."""
        address, settings = entry.address, self._settings
        assert address is not None
        socket = None
        try:
            socket = connecting_socket(
                self._context, settings.limits, settings.keys, entry.public_key, ipv6=address.is_ipv6
            )
            host = Host(entry, socket, monitor_of(socket))
            socket.connect(address.endpoint)
        except zmq.ZMQError as error:
            self._complain("sockets_failed", f"{entry.name} at {address} is tried again in a second: {error}")
            if socket is not None:
                socket.disable_monitor()
                socket.close(0)
            return None
        self._hosts[entry] = host
        return host

    def _look(self, host: Host) -> None:
        """What became of the connection."""
        while (event := next_event(host.monitor)) is not None:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                host.connected, host.accepted, host.refused, host.introduce_at = True, False, False, 0.0
            elif event == zmq.EVENT_DISCONNECTED:
                host.reason = "disconnected" if host.connected else host.reason
                host.connected = host.accepted = False
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                host.reason = "the connection was closed before it was open"
                self._complain("handshakes_failed", f"{host.entry.name} at {host.entry.address}: {host.reason}")
            else:
                host.refused = True  # ZeroMQ does not try again by itself
                host.introduce_at = self._clock.monotonic() + self._settings.limits.introduce_every_s
                host.reason = "the handshake failed; compare the keys on both sides, and whether both have some"
                self._complain("handshakes_failed", f"{host.entry.name} at {host.entry.address}: {host.reason}")
        self.introduce(self._clock.monotonic())

    def _answered(self, host: Host, frame: bytes) -> None:
        try:
            answer = decode_hello(frame)
        except ProtocolError as error:
            self._complain("malformed", f"an answer of {host.entry.name} was dropped: {error}")
            return
        if isinstance(answer, Accepted):
            self._accepted(host, answer)
        elif isinstance(answer, Declined):
            host.accepted, host.reason = False, answer.reason
            self._complain("declined_by_peer", f"{host.entry.name} turned this engine away: {answer.reason}")
        else:
            self._complain("malformed", f"{host.entry.name} answered HELLO with HELLO")

    def _accepted(self, host: Host, answer: Accepted) -> None:
        before = self._by_engine.get(answer.engine_id)
        if not SUPPORTED.lowest <= answer.version <= SUPPORTED.highest:
            host.reason = f"it chose protocol version {answer.version}; this engine speaks {SUPPORTED}"
        elif answer.engine_id == self._engine_id or (before is not None and before is not host and before.accepted):
            host.reason = f"it calls itself {answer.engine_id!r}, as another engine does"
        else:
            self._name(host, answer.engine_id)
            return
        self._complain("declined", f"{host.entry.name} at {host.entry.address} is not spoken to: {host.reason}")

    def _name(self, host: Host, engine_id: str) -> None:
        """Its messages go there from now on, and those for who was there before still do."""
        host.accepted, host.reason = True, ""
        if engine_id in host.engine_ids:
            host.engine_ids.remove(engine_id)
        elif len(host.engine_ids) == host.engine_ids.maxlen:
            self._by_engine.pop(host.engine_ids[0], None)
        host.engine_ids.append(engine_id)
        self._by_engine[engine_id] = host

    def _forget(self, host: Host) -> None:
        for engine_id in host.engine_ids:
            if self._by_engine.get(engine_id) is host:
                del self._by_engine[engine_id]


def _sockets(hosts: Sequence[Host]) -> list[Socket]:
    return [socket for host in hosts for socket in (host.socket, host.monitor)]
