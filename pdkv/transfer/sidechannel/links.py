"""The peers of a side channel: guests, which connected to us, and hosts, to which we connect."""

from __future__ import annotations

from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field

import zmq

from pdkv.transfer.sidechannel.peers import PeerEntry
from pdkv.transfer.sidechannel.sockets import Socket

#: Engines that have been at one address, whose messages still go there: the one there now says that they are gone.
REMEMBERED = 4


@dataclass(slots=True)
class Guest:
    """A peer that said HELLO to us. `user`: its public key in hex, "" without keys."""

    identity: bytes
    engine_id: str
    user: str


@dataclass(slots=True)
class Host:
    """A peer of the peer book, at one address.

    Attributes:
        engine_ids: who answered there, the last one now.
        connected, accepted: whether there is a connection, and whether the peer has answered our HELLO on it.
        refused: the connection was closed in its handshake, for its keys or version of ZeroMQ.
        introduce_at: when to say HELLO (again), or to connect again.
    """

    entry: PeerEntry
    socket: Socket
    monitor: Socket
    engine_ids: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    connected: bool = False
    accepted: bool = False
    refused: bool = False
    introduce_at: float = 0.0
    reason: str = "not reached yet"

    def send(self, frame: bytes) -> None:
        """Raises zmq.Again where there is no connection or no room."""
        self.socket.send(frame, zmq.NOBLOCK)

    def connect_again(self) -> None:
        assert self.entry.address is not None
        self.refused = False
        with suppress(zmq.ZMQError):  # ZeroMQ may have dropped it already
            self.socket.disconnect(self.entry.address.endpoint)
        self.socket.connect(self.entry.address.endpoint)


class Guests:
    """The guests, those last who were heard from last. When there is no room, who was silent longest must go."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._guests: OrderedDict[bytes, Guest] = OrderedDict()
        self._by_engine: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._guests)

    def heard(self, identity: bytes) -> Guest | None:
        """The guest with this connection, who has just been heard."""
        guest = self._guests.get(identity)
        if guest is not None:
            self._guests.move_to_end(identity)
        return guest

    def of_engine(self, engine_id: str) -> Guest | None:
        identity = self._by_engine.get(engine_id)
        return None if identity is None else self._guests[identity]

    def add(self, guest: Guest) -> int:
        """Take the place of an earlier connection of the same engine; how many others had to go for lack of room."""
        if (before := self.of_engine(guest.engine_id)) is not None:
            self.remove(before.identity)
        self.remove(guest.identity)
        self._guests[guest.identity] = guest
        self._by_engine[guest.engine_id] = guest.identity
        evicted = 0
        while len(self._guests) > self._most:
            self.remove(next(iter(self._guests)))
            evicted += 1
        return evicted

    def remove(self, identity: bytes) -> None:
        """Idempotent."""
        guest = self._guests.pop(identity, None)
        if guest is not None:
            del self._by_engine[guest.engine_id]

    def all(self) -> list[Guest]:
        return list(self._guests.values())

    def names(self) -> list[str]:
        return sorted(self._by_engine)
