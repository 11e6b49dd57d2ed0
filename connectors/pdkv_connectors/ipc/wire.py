"""What P and D say to each other over a Unix socket: one typed MessagePack message a packet, bounded (I14).

======= ========= ==========================================================================================
message direction meaning
======= ========= ==========================================================================================
HELLO   D → P     I know your key; give me your memory in this generation
GRANT   P → D     chunks of one of my memories, their descriptors with it; several, until `last`
REFUSE  P → D     no; the socket is closed after it
OFFER   D → P     I am to read these blocks: finish what writes them, and sum them
OFFERED P → D     done, or why not
DROP    P → D     my memory goes away: unmap it, close it
DROPPED D → P     nothing of it is held here any more
======= ========= ==========================================================================================

SOCK_SEQPACKET keeps the borders of messages, and descriptors with the message that they belong to.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import Annotated

import msgspec

from pdkv.errors import ProtocolError, TransportError
from pdkv.memory import Piece
from pdkv.transfer.messages import Count, EngineRef, Name, Text
from pdkv.transfer.unpacking import unpack

VERSION = 1
MAX_PACKET_NBYTES = 1 << 17
MAX_FDS = 250  # Linux passes 253 at once
MAX_OFFERED_BLOCKS = 8192  # of one message
KEY_NBYTES = 32

_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="HELLO"):
    version: Count
    key: _Key
    sender: EngineRef
    wanted: EngineRef


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="GRANT"):
    """`memory`: 0 the cache, 1 its table of sums, 2 the board; `nbytes` long in all; `pieces` as (offset, nbytes)."""

    memory: Annotated[int, msgspec.Meta(ge=0, le=2)]
    nbytes: Count
    pieces: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=MAX_FDS)]
    last: bool


class Refuse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="REFUSE"):
    reason: Text


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="OFFER"):
    ticket: Count
    group: _BlockId
    blocks: Annotated[tuple[_BlockId, ...], msgspec.Meta(min_length=1, max_length=MAX_OFFERED_BLOCKS)]


class Offered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="OFFERED"):
    """`problem`: why not; empty where all is well."""

    ticket: Count
    problem: Text = ""


class Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="DROP"):
    pass


class Dropped(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="DROPPED"):
    pass


Message = Hello | Grant | Refuse | Offer | Offered | Drop | Dropped

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where P listens, what lets a peer in, and what it will be given; a part of the handshake's metadata.

    Attributes:
        machine: the kernel's boot id: descriptors reach no other machine.
        name: of the socket, in Linux's abstract namespace.
        verifies: whether there are sums.
    """

    version: Count
    machine: Name
    name: Name
    key: _Key
    verifies: bool


_address_decoder = msgspec.msgpack.Decoder(Address)


def read_address(data: bytes) -> Address:
    """Back from :meth:`encode_address`.

    Raises:
        ProtocolError: it is none, or of another version.
    """
    address = unpack(_address_decoder, data, "a peer's ipc metadata")
    if address.version != VERSION:
        raise ProtocolError(
            f"the peer speaks ipc version {address.version} and this engine {VERSION}; run the same pdkv."
        )
    return address


def write_address(address: Address) -> bytes:
    """As bytes for the handshake."""
    return _encoder.encode(address)


def send(connection: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Send one message with its descriptors.

    Raises:
        OSError: the peer has gone, or does not take it in time.
    """
    data = _encoder.encode(message)
    if fds:
        socket.send_fds(connection, [data], list(fds))
    else:
        connection.send(data)


def send_now(connection: socket.socket, message: Message) -> bool:
    """Send one message without waiting; False where the peer has not taken those before it, and this one is not sent.

    Args:
        connection: one with a timeout.

    Raises:
        OSError: the peer has gone.
    """
    try:
        os.write(connection.fileno(), _encoder.encode(message))  # send() would wait for as long as the timeout says
    except BlockingIOError:
        return False
    return True


def receive(connection: socket.socket) -> tuple[Message, tuple[int, ...]] | None:
    """The next message and its descriptors, which are the caller's; None where the peer has closed.

    Raises:
        ProtocolError: it is not valid; its descriptors were closed.
        TransportError: this process cannot take as many descriptors; those that came were closed.
        OSError: nothing came in time.
    """
    data, found, flags, _ = socket.recv_fds(connection, MAX_PACKET_NBYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    fds = tuple(found)
    if not data:
        close_all(fds)
        return None
    try:
        if flags & socket.MSG_CTRUNC and len(fds) < MAX_FDS:
            raise TransportError("no file descriptor is left for what a peer hands over; raise `ulimit -n`.")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError(
                f"a packet of more than {MAX_PACKET_NBYTES} bytes or {MAX_FDS} descriptors; it is refused."
            )
        message = unpack(_decoder, data, "an ipc message")
        if fds and not (isinstance(message, Grant) and len(fds) == len(message.pieces)):
            raise ProtocolError("a message came with descriptors that do not belong to it; it is refused.")
    except (ProtocolError, TransportError):
        close_all(fds)
        raise
    return message, fds


def close_all(fds: tuple[int, ...]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def require_same_user(connection: socket.socket) -> None:
    """Refuse a peer that runs as another user.

    Raises:
        TransportError: it does.
    """
    credentials = struct.Struct("3i")
    _, user, _ = credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    if user != os.geteuid():
        raise TransportError(
            f"the peer runs as user {user} and this engine as {os.geteuid()}; run both as the same user."
        )


def machine_id() -> str:
    """Tells this machine, since it was started, from every other.

    Raises:
        OSError: it cannot be told now, as where no descriptor is left. The name of the host would be another answer.
    """
    with suppress(FileNotFoundError, PermissionError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def pieces_of(grant: Grant) -> list[Piece]:
    """The pieces of a grant as the memory knows them."""
    return [Piece(offset, nbytes) for offset, nbytes in grant.pieces]
