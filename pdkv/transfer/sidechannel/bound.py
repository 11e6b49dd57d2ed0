"""The end of a side channel that listens: a ROUTER, its allow-list, and the peers that have connected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import zmq

from pdkv.errors import ProtocolError
from pdkv.transfer.complaints import Complaints
from pdkv.transfer.sidechannel.addresses import Address
from pdkv.transfer.sidechannel.hello import (
    SUPPORTED,
    Accepted,
    AnyHello,
    Declined,
    Hello,
    agree,
    decode_hello,
    encode_hello,
    is_hello,
)
from pdkv.transfer.sidechannel.links import Guest, Guests
from pdkv.transfer.sidechannel.peers import PeerEntry
from pdkv.transfer.sidechannel.settings import SideChannelSettings
from pdkv.transfer.sidechannel.sockets import Context, Socket, bound_socket
from pdkv.transfer.sidechannel.zap import Doorkeeper

MAX_READ = 256  # messages in one turn, so that sending and timers have theirs


class BoundEnd:
    """Belongs to the thread that makes it."""

    def __init__(self, context: Context, engine_id: str, settings: SideChannelSettings, complain: Complaints) -> None:
        assert settings.bind is not None
        self.guests = Guests(settings.limits.max_guests)
        self._engine_id = engine_id
        self._complain = complain
        self._has_keys = settings.keys is not None
        self._allowed: frozenset[bytes] = frozenset()
        self._doorkeeper = Doorkeeper(context, self._is_allowed, self._key_refused) if self._has_keys else None
        self._socket = bound_socket(context, settings.limits, settings.keys, ipv6=settings.bind.is_ipv6)

    def bind(self, address: Address) -> Address:
        """Listen; the address with the port that it really is. Raises zmq.ZMQError."""
        self._socket.bind(address.endpoint)
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return Address.parse(endpoint.rstrip(b"\0").decode())

    def sockets(self) -> tuple[Socket, ...]:
        """To be polled."""
        return (self._socket,) if self._doorkeeper is None else (self._socket, self._doorkeeper.socket)

    def allow(self, entries: Sequence[PeerEntry]) -> None:
        """The allow-list is this from now on. Guests whose key is not on it any more are heard no longer."""
        allowed = frozenset(entry.public_key for entry in entries if entry.public_key is not None)
        if allowed == self._allowed:
            return
        self._allowed = allowed
        if self._has_keys:
            for guest in self.guests.all():
                if bytes.fromhex(guest.user) not in allowed:
                    self.guests.remove(guest.identity)

    def send(self, engine_id: str, frame: bytes) -> bool:
        """Whether the frame is on its way to a guest."""
        guest = self.guests.of_engine(engine_id)
        return guest is not None and self._send_to(guest.identity, frame)

    def receive(self) -> Iterator[tuple[str, bytes]]:
        """Sender and frame of each message of a guest; connections and introductions are dealt with on the way."""
        if self._doorkeeper is not None:
            self._doorkeeper.answer()
        for _ in range(MAX_READ):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) != 2:
                self._complain("malformed", f"a message of {len(frames) - 1} parts was dropped; there must be one")
                continue
            identity, frame = frames[0].bytes, frames[1].bytes
            user = str(frames[1].get("User-Id")) if self._has_keys else ""
            if is_hello(frame):
                self._introduced(identity, user, frame)
            elif (guest := self._heard(identity, user)) is not None:
                yield guest.engine_id, frame

    def _heard(self, identity: bytes, user: str) -> Guest | None:
        guest = self.guests.heard(identity)
        if guest is None:
            self._complain("unintroduced", "a message from someone who has not said HELLO was dropped")
            self._answer(identity, Declined(reason="say HELLO first"))
        return guest

    def _introduced(self, identity: bytes, user: str, frame: bytes) -> None:
        try:
            hello = decode_hello(frame)
            if not isinstance(hello, Hello):
                raise ProtocolError("an answer came where a HELLO was expected.")
            version = agree(SUPPORTED, hello.versions)
            self._require_own_name(hello, user)
        except ProtocolError as error:
            self._complain("declined", f"a peer was turned away: {error}")
            self._answer(identity, Declined(reason=str(error)[:512]))
            return
        if self.guests.add(Guest(identity, hello.engine_id, user)):
            self._complain("guests_evicted", "there is no room for more peers; who was silent longest was forgotten")
        self._answer(identity, Accepted(engine_id=self._engine_id, version=version))

    def _require_own_name(self, hello: Hello, user: str) -> None:
        if self._has_keys and bytes.fromhex(user) not in self._allowed:
            raise ProtocolError("its key is not on the allow-list any more.")
        before = self.guests.of_engine(hello.engine_id)
        if hello.engine_id == self._engine_id or (before is not None and before.user != user):
            raise ProtocolError(
                f"engine id {hello.engine_id!r} belongs to another engine; every start needs a new one."
            )

    def _answer(self, identity: bytes, answer: AnyHello) -> None:
        self._send_to(identity, encode_hello(answer))

    def _send_to(self, identity: bytes, frame: bytes) -> bool:
        try:
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            self._complain("peer_queue_full", "a message was dropped: its receiver takes none")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.guests.remove(identity)
            self._complain("peer_left", "a message was dropped: its receiver has left")
        else:
            return True
        return False

    def _is_allowed(self, key: bytes) -> bool:
        return key in self._allowed

    def _key_refused(self, key: bytes, address: str) -> None:
        self._complain("refused_keys", f"a connection from {address} was refused: its key {key.hex()} is not allowed")
