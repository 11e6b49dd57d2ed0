"""What the two ends of a UCX connection say to each other beside the bytes of blocks.

Whoever connects sends HELLO and then asks; the other end serves. HELLO's token comes from the peer's description, which
travels by the side channel: a listener of UCX takes connections from anywhere.

======== ========== ==========================================================================
message  direction  meaning
======== ========== ==========================================================================
HELLO    to server  the token
ASK      to server  send me these bytes (READ), or take these (WRITE)
GO       to asker   it begins; number 0 answers HELLO
NO       to asker   it does not, and nothing is in flight
END      both       READ: all is sent, and was this cache's to the end. WRITE: all is in place
QUESTION to server  about sums: a message of `pdkv_connectors.checking.wire`
ANSWER   to asker   the message that answers it
BYE      both       close this connection; the sender waits for that
======== ========== ==========================================================================
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.errors import ProtocolError
from pdkv.transfer.messages import Count, Digest, EngineRef, Text
from pdkv.transfer.unpacking import unpack
from pdkv_connectors.checking.wire import MAX_BODY_NBYTES

HEADER_NBYTES = 8
_MAGIC = b"PDKU"
MAX_COPIES = 2**20
MAX_CONTROL_NBYTES = 16 * MAX_COPIES + 4096
MAX_HELLO_NBYTES = 4096

Array = npt.NDArray[np.int64]
Numbers = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_COPIES)]
Body = Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_NBYTES)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="HELLO"):
    token: Digest


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ASK"):
    """`offsets` (from the cache's base) and `nbytes` are int64, little-endian, one per copy; `server` as it was met."""

    number: Count
    server: EngineRef
    reads: bool
    offsets: Numbers
    nbytes: Numbers


class Go(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="GO"):
    number: Count


class No(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="NO"):
    number: Count
    reason: Text


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="END"):
    number: Count


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="QUESTION"):
    number: Count
    body: Body


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ANSWER"):
    number: Count
    body: Body


class Bye(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="BYE"):
    reason: Text


Control = Hello | Ask | Go | No | End | Question | Answer | Bye

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Control)


def encode_control(control: Control) -> tuple[bytes, bytes]:
    """Header and body."""
    body = _encoder.encode(control)
    return _MAGIC + len(body).to_bytes(4, "little"), body


def body_nbytes(header: bytes, most: int) -> int:
    """The length of the body.

    Raises:
        ProtocolError: it is no header, or the body is longer than `most`.
    """
    nbytes = int.from_bytes(header[4:], "little")
    if header[:4] != _MAGIC or len(header) != HEADER_NBYTES or not 0 < nbytes <= most:
        raise ProtocolError(f"a UCX peer sent something that is no message of at most {most} bytes.")
    return nbytes


def decode_control(body: bytes) -> Control:
    """Raises ProtocolError where it is not valid."""
    return unpack(_decoder, body, "a message of a UCX peer")


def arrays_of(ask: Ask) -> tuple[Array, Array]:
    """Offsets and sizes, writable by nobody.

    Raises:
        ProtocolError: they are not two lists of one length, or sizes are not positive.
    """
    if len(ask.offsets) % 8 or len(ask.offsets) != len(ask.nbytes) or not ask.offsets:
        raise ProtocolError(f"{len(ask.offsets)} bytes of offsets came with {len(ask.nbytes)} bytes of sizes.")
    offsets, nbytes = (np.frombuffer(part, "<i8").astype(np.int64) for part in (ask.offsets, ask.nbytes))
    if (offsets < 0).any() or (nbytes <= 0).any() or (nbytes > 2**48).any() or (offsets > 2**56).any():
        raise ProtocolError("an offset or a size is out of range.")
    return offsets, nbytes
