"""What the side that moves blocks asks the other one, and what it hears: typed MessagePack, bounded (I14).

========= ========== ================================================================================================
message   direction  meaning
========= ========== ================================================================================================
WANTED    reader     what do these blocks hash to: as you offered them, or now where you have not
SUMS      owner      uint64 ``[blocks, layers of the group]``, of whole pages
COMPARE   writer     I have written these blocks, and they hash to this: compare what you have
COMPARED  receiver   all are right, or the place of one that is not
REFUSED   both       no answer to this, and why
========= ========== ================================================================================================
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.errors import ProtocolError
from pdkv.transfer.blocks import MAX_BLOCKS
from pdkv.transfer.messages import EngineRef, Text
from pdkv.transfer.unpacking import unpack

MAX_SUMS = 1 << 16
"""Of one message: 512 KiB. Of a group with more layers than this no single block would fit."""

MAX_BODY_NBYTES = 8 * MAX_SUMS + 4 * MAX_BLOCKS + 4096

T = TypeVar("T")

Blocks = npt.NDArray[np.int32]
SumArray = npt.NDArray[np.uint64]

_Group = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Ids = Annotated[bytes, msgspec.Meta(min_length=4, max_length=4 * MAX_BLOCKS)]
_Sums = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_SUMS)]


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="WANTED"):
    """`owner`: who is asked, in the generation that the reader knows (I10). `blocks`: int32, little-endian."""

    owner: EngineRef
    group: _Group
    blocks: _Ids


class Compare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="COMPARE"):
    """`sums` as in SUMS; `is_final`: the writer has summed its blocks again, and the sums are the same."""

    owner: EngineRef
    group: _Group
    blocks: _Ids
    sums: _Sums
    is_final: bool = False


class Sums(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="SUMS"):
    sums: _Sums


class Compared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="COMPARED"):
    """`wrong`: the place of a block that differs among those that were named; -1 where none does."""

    wrong: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_BLOCKS)]


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="REFUSED"):
    reason: Text


Question = Wanted | Compare
Answer = Sums | Compared | Refused

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """One message."""
    return _encoder.encode(message)


def decode_question(body: bytes) -> Question:
    """Raises ProtocolError where it is none."""
    return _decoded(_questions, body)


def decode_answer(body: bytes) -> Answer:
    """Raises ProtocolError where it is none."""
    return _decoded(_answers, body)


def write_ids(blocks: Blocks) -> bytes:
    """As in messages."""
    return blocks.astype("<i4").tobytes()


def read_ids(data: bytes) -> Blocks:
    """Raises ProtocolError where they are not whole numbers, or negative."""
    if len(data) % 4:
        raise ProtocolError(f"{len(data)} bytes are no list of block ids.")
    blocks = np.frombuffer(data, "<i4").astype(np.int32)
    if (blocks < 0).any():
        raise ProtocolError("a negative block id was named.")
    return blocks


def write_sums(sums: SumArray) -> bytes:
    """As in messages."""
    return sums.astype("<u8").tobytes()


def read_sums(data: bytes, blocks: int, layers: int) -> SumArray:
    """uint64 ``[blocks, layers]``. Raises ProtocolError where there are more or fewer."""
    if len(data) != 8 * blocks * layers:
        raise ProtocolError(f"{len(data)} bytes of sums came for {blocks} blocks of {layers} layers.")
    return np.frombuffer(data, "<u8").astype(np.uint64).reshape(blocks, layers)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    if len(body) > MAX_BODY_NBYTES:
        raise ProtocolError(f"a message about sums has {len(body)} bytes, {MAX_BODY_NBYTES} are the most.")
    return unpack(decoder, body, "a message about sums")
