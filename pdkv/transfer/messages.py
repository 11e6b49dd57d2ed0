"""What P and D say to each other: typed MessagePack behind a version byte, bounded in size and count (I14).

A frame is ``b"PDKV"``, one version byte, and one MessagePack map. Unknown fields, unknown types and values out of range
are refused. All times are durations in seconds that remain; no clock reading is ever sent. Every message names the
engine and generation that it comes from and the ones that it is meant for (I10).

======== ========= ======================================================================================
message  direction meaning
======== ========= ======================================================================================
HANDSHAKE both     what I am; answered by WELCOME or REFUSE
WELCOME  both      what I am, and we fit
REFUSE   both      we do not fit; only the requests that need this pair fail. Or: who was meant is not here any more
RENEW    D → P     keep the blocks of this request; answered by RENEWED
RENEWED  P → D     the lease's state and the seconds that remain of it
REGISTER D → P     push: write the blocks of this request here; may come before P has them
DONE     D → P     D wants nothing more of this request: the lease ends
DONE     P → D     push: every byte has been written
FAIL     D → P     D gave up on the transfer: the lease ends
FAIL     P → D     the transfer did not happen, and nothing of it is in flight
ABORT    D → P     the request is over on D (client gone, refused): the lease ends
ABORT    P → D     P wants its blocks back: D stops, then acknowledges
CANCEL   D → P     stop this one transfer, keep the lease: D will ask again
ACK      both      to REGISTER: taken. To the others: taken, and nothing of the transfer is in flight any more
======== ========= ======================================================================================
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from pdkv.errors import ProtocolError
from pdkv.transfer.blocks import MAX_GROUPS, BlockRun
from pdkv.transfer.shards import Shards
from pdkv.transfer.unpacking import unpack

PROTOCOL_VERSION = 1
MAX_MESSAGE_NBYTES = 2 * 2**20  # 65,536 block ids take 5 bytes each at most; agent metadata a few KiB
MAX_METADATA_NBYTES = 2**20
_MAGIC = b"PDKV"

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Runs = Annotated[tuple[BlockRun, ...], msgspec.Meta(max_length=MAX_GROUPS)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class TransferKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names one attempt to move one request's KV to one rank of D. Never used twice.

    Attributes:
        request_id: the request, as P knows it.
        transfer_id: counts up over all transfers of one D engine, so that an attempt that is over stays over.
        rank: the rank of D whose blocks are the destination.
    """

    request_id: Name
    transfer_id: Count
    rank: Rank


class Claim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What D shows P of its reference: P issued it, it is unaltered, and this is its one use.

    Attributes:
        digest: over all fields of the reference as D has them.
        mac: the reference's own, by which P knows the digest again.
        use: the same in all messages about one use of the reference, another one in another use by the same engine.
    """

    digest: Digest
    mac: Digest
    use: Count


class EngineRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An engine in one generation of its registered memory. A restarted engine has another id."""

    engine_id: Name
    generation: Count


class Compatibility(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be equal on both sides for bytes of one cache to mean the same in the other.

    Attributes:
        layout, block_size, shards: may differ where both sides say that they convert; the model in `shards` may not.
        block_size: tokens in a block.
        shards: None: this engine exchanges KV only with one of equal layout, block size and number of ranks.
        converts: whether the transport can convert one layout, block size and number of heads to another.
    """

    model: Text
    dtype: Text
    cache_dtype: Text
    layout: Text
    block_size: Count
    connector: Text
    shards: Shards | None = None
    converts: bool = False


class Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer must know of an engine before it moves a byte.

    Attributes:
        num_blocks: blocks that are committed; P and D may have different counts.
        metadata: the transport's own, opaque here.
    """

    compatibility: Compatibility
    num_blocks: Count
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_NBYTES)] = b""


class FailCode(StrEnum):
    """Why a transfer or a request failed; the operator's word for it, also in metrics and on the wire."""

    INCOMPATIBLE = "incompatible"  # another model, dtype, layout, block size or version
    WRONG_ENGINE = "wrong_engine"  # another engine answers at this address: the one that was meant has gone
    STALE_GENERATION = "stale_generation"  # its memory has been replaced since
    ASLEEP = "asleep"
    LEASE_LOST = "lease_lost"  # P does not hold the blocks any more, or may not
    BAD_BLOCKS = "bad_blocks"  # ids out of range, used twice, or indices that do not match
    REPLAYED = "replayed"  # a reference or a transfer id that was used before
    FORGED = "forged"  # a reference that P did not issue, or not so
    EXPIRED = "expired"  # a reference that nobody used in time
    NO_ROOM = "no_room"  # a bounded table is full
    POST_FAILED = "post_failed"  # the transport would not take the transfer
    TRANSFER_FAILED = "transfer_failed"  # the transport took it and reported an error
    TIMED_OUT = "timed_out"
    PEER_LOST = "peer_lost"
    PREFILL_ABORTED = "prefill_aborted"


class LeaseState(StrEnum):
    """What P knows of a request's blocks."""

    LIVE = "live"
    UNKNOWN = "unknown"  # never heard of it: prefill may still be running
    ENDED = "ended"


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """What all messages carry.

    Attributes:
        sender, receiver: engines with the generation that each was in when the message was made.
        floor: D's lowest transfer id that is still alive; P forgets all below it. 0 from P.
    """

    sender: EngineRef
    receiver: EngineRef
    floor: Count = 0


class Handshake(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="HANDSHAKE"):
    descriptor: Descriptor


class Welcome(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="WELCOME"):
    descriptor: Descriptor


class Refuse(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="REFUSE"):
    """`meant`: the engine that the refused message was for, which is the sender or was at its address before it."""

    meant: EngineRef
    code: FailCode
    reason: Text


class Keyed(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message about one transfer.

    Attributes:
        claim: from D, in all but ACK: its right to ask. Without it P gives and ends nothing. None from P.
    """

    key: TransferKey
    claim: Claim | None = None
    #: Whether the sender repeats it until it is acknowledged.
    reliable: ClassVar[bool] = True


class Renew(Keyed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="RENEW"):
    """`sequence` comes back in RENEWED, so that D counts what remains from when it asked, on its own clock."""

    sequence: Count
    reliable: ClassVar[bool] = False


class Renewed(Keyed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="RENEWED"):
    sequence: Count
    state: LeaseState
    remaining_s: Seconds
    reliable: ClassVar[bool] = False


class Register(Keyed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="REGISTER"):
    """`remaining_s`: how much longer D waits; P forgets a registration without a request after that."""

    num_tokens: Count
    runs: Runs
    remaining_s: Seconds


class Done(Keyed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="DONE"):
    pass


class Fail(Keyed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="FAIL"):
    code: FailCode
    reason: Text


class Abort(Keyed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ABORT"):
    reason: Text


class Cancel(Keyed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="CANCEL"):
    pass


class Ack(Keyed, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ACK"):
    """`of`: the type of the message that is acknowledged, e.g. ``"DONE"``."""

    of: Text
    reliable: ClassVar[bool] = False


AnyMessage = (
    Handshake | Welcome | Refuse | Renew | Renewed | Register | Done | Fail | Abort | Cancel | Ack
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def type_of(message: Message) -> str:
    """The type's name on the wire, e.g. ``"REGISTER"``."""
    return str(message.__struct_config__.tag)


def encode(message: Message) -> bytes:
    """One frame.

    Raises:
        ProtocolError: it would be larger than a peer accepts.
    """
    frame = _MAGIC + bytes((PROTOCOL_VERSION,)) + _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"a {type_of(message)} of {len(frame)} bytes exceeds the limit of {MAX_MESSAGE_NBYTES}.")
    return frame


def decode(frame: bytes) -> AnyMessage:
    """The message in a frame.

    Raises:
        ProtocolError: not a frame of pdkv, too large, of another version, or not a valid message.
    """
    if len(frame) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes exceeds the limit of {MAX_MESSAGE_NBYTES}; it is dropped.")
    if not frame.startswith(_MAGIC) or len(frame) <= len(_MAGIC):
        raise ProtocolError(f"a frame of {len(frame)} bytes does not begin as pdkv's do; the peer is something else.")
    version = frame[len(_MAGIC)]
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {version} and this engine {PROTOCOL_VERSION}; run the same pdkv on both."
        )
    return unpack(_decoder, memoryview(frame)[len(_MAGIC) + 1 :], "a message")
