"""What an engine with the auto transport tells its peers: those of all its transports, and which host it is on."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdkv.errors import ProtocolError, TransportError
from pdkv.transfer.messages import MAX_METADATA_NBYTES
from pdkv.transfer.unpacking import unpack


class Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The host, and what each transport says, by name."""

    host: Annotated[str, msgspec.Meta(max_length=256)]
    transports: Annotated[dict[str, bytes], msgspec.Meta(max_length=16)]

    def encode(self) -> bytes:
        """As bytes for a handshake.

        Raises:
            TransportError: they are more than a handshake may hold.
        """
        frame = msgspec.msgpack.encode(self)
        if len(frame) > MAX_METADATA_NBYTES:
            raise TransportError(f"{len(self.transports)} transports take {len(frame)} bytes to describe; use fewer.")
        return frame

    @classmethod
    def decode(cls, metadata: bytes) -> Description:
        """Back from :meth:`encode`, from a peer that may send anything.

        Raises:
            ProtocolError: it is no description.
        """
        if len(metadata) > MAX_METADATA_NBYTES:
            raise ProtocolError(f"a peer's metadata has {len(metadata)} bytes, more than {MAX_METADATA_NBYTES}.")
        return unpack(_decoder, metadata, "a peer's metadata for the auto transport")


_decoder = msgspec.msgpack.Decoder(Description)
