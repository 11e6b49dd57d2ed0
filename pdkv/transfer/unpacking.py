"""Reading MessagePack that somebody else has sent."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdkv.errors import ProtocolError

T = TypeVar("T")


def unpack(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, what: str) -> T:
    """What `data` holds.

    Args:
        what: begins the error, as "a message".

    Raises:
        ProtocolError: it is not valid: by its type, as text that is no UTF-8, or nested too deep, which msgspec says in
            three ways.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what} is not valid: {error}") from error
