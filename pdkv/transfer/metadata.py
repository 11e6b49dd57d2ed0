"""What :meth:`pdkv.transfer.transport.Transport.describe` returns, as transports that share their base write it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdkv.errors import ProtocolError, StaleGenerationError, TransportError
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.messages import MAX_METADATA_NBYTES, EngineRef
from pdkv.transfer.unpacking import unpack


class Metadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of a transport by its name; `own` is the transport's."""

    transport: Annotated[str, msgspec.Meta(max_length=64)]
    engine: EngineRef
    geometry: bytes
    own: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Metadata)


def write_metadata(metadata: Metadata) -> bytes:
    """As bytes for the handshake.

    Raises:
        TransportError: they would be more than a peer takes.
    """
    frame = _encoder.encode(metadata)
    if len(frame) > MAX_METADATA_NBYTES:
        raise TransportError(
            f"the {metadata.transport} transport's metadata takes {len(frame)} bytes, {MAX_METADATA_NBYTES} are "
            "allowed; commit with defragment=True, so that there are fewer extents."
        )
    return frame


def read_metadata(data: bytes, transport: str, peer: EngineRef) -> tuple[CacheGeometry, bytes]:
    """The peer's geometry, and what is its transport's own.

    Raises:
        ProtocolError: it is not valid.
        TransportError: it is another transport's.
        StaleGenerationError: it is of another engine or generation.
    """
    if len(data) > MAX_METADATA_NBYTES:
        raise ProtocolError(f"a peer's metadata has {len(data)} bytes, more than {MAX_METADATA_NBYTES}.")
    found = unpack(_decoder, data, "a peer's transport metadata")
    if found.transport != transport:
        raise TransportError(f"the peer's transport is {found.transport!r}, this one {transport!r}; use the same.")
    if found.engine != peer:
        raise StaleGenerationError(
            f"the metadata is of engine {found.engine.engine_id!r} in generation {found.engine.generation}, not of "
            f"{peer.engine_id!r} in {peer.generation}; handshake again."
        )
    return CacheGeometry.decode(found.geometry), found.own
