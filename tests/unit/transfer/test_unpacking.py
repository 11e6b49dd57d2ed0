"""What peers send is refused as a ProtocolError, whatever msgspec makes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdkv.errors import ProtocolError
from pdkv.transfer.unpacking import unpack

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("kind", "data"),
    [(int, b"\xa1a"), (str, b"\xa1\xff"), (Any, 100_000 * b"\x91" + b"\x90"), (int, b"")],
    ids=["of another type", "no UTF-8", "nested too deep", "cut short"],
)
def test_what_is_not_valid_is_refused_by_name(kind: Any, data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^a message is not valid: "):
        unpack(msgspec.msgpack.Decoder(kind), data, "a message")


def test_what_is_valid_is_read_from_any_buffer() -> None:
    assert unpack(msgspec.msgpack.Decoder(int), memoryview(b"\x07"), "a message") == 7
