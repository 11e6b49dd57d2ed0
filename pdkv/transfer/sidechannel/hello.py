"""How two side channels meet: each says who it is and which protocol versions it speaks, before any message.

This exchange itself never changes, so that any two versions can at least tell each other that they do not fit. A frame
is ``b"PDKH"`` and one MessagePack map.

========= ==================== ==========================================================================
frame     direction            meaning
========= ==================== ==========================================================================
HELLO     connecting → bound   who I am, the versions that I speak
ACCEPTED  bound → connecting   who I am, the version that we speak from now on
DECLINED  bound → connecting   why not; also the answer to messages from someone who has not said HELLO
========= ==================== ==========================================================================
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdkv.errors import ProtocolError
from pdkv.transfer.messages import PROTOCOL_VERSION, Name, Text
from pdkv.transfer.unpacking import unpack

MAX_HELLO_NBYTES = 4096
_MAGIC = b"PDKH"

Version = Annotated[int, msgspec.Meta(ge=1, le=255)]


class Versions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A range of protocol versions, both ends included."""

    lowest: Version
    highest: Version

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}" if self.lowest != self.highest else str(self.lowest)


#: What this pdkv speaks.
SUPPORTED = Versions(PROTOCOL_VERSION, PROTOCOL_VERSION)


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="HELLO"):
    engine_id: Name
    versions: Versions


class Accepted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ACCEPTED"):
    engine_id: Name
    version: Version


class Declined(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="DECLINED"):
    reason: Text


AnyHello = Hello | Accepted | Declined

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyHello)


def encode_hello(hello: AnyHello) -> bytes:
    """One frame."""
    return _MAGIC + _encoder.encode(hello)


def is_hello(frame: bytes) -> bool:
    """Whether the frame belongs to this exchange; it may still be invalid."""
    return frame.startswith(_MAGIC)


def decode_hello(frame: bytes) -> AnyHello:
    """The content of a frame.

    Raises:
        ProtocolError: too large, or not valid.
    """
    if len(frame) > MAX_HELLO_NBYTES or not is_hello(frame):
        raise ProtocolError(f"a frame of {len(frame)} bytes is no introduction; it is dropped.")
    return unpack(_decoder, memoryview(frame)[len(_MAGIC) :], "an introduction")


def agree(ours: Versions, theirs: Versions) -> int:
    """The highest version that both speak.

    Raises:
        ProtocolError: there is none; the message names both ranges.
    """
    version = min(ours.highest, theirs.highest)
    if version < max(ours.lowest, theirs.lowest):
        raise ProtocolError(
            f"the peer speaks protocol version {theirs} and this engine {ours}; run pdkv of versions that overlap."
        )
    return version
