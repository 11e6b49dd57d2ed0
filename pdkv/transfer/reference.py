"""What travels from P to D through whoever routes the request: where the KV of a prompt is, sealed by P.

Routers and clients carry a reference and could change it. So P puts a MAC over all of its fields, with a key that only
P has; D, which cannot check it, shows P a digest of what it got together with the MAC (:class:`Claim`).
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pdkv.errors import ProtocolError
from pdkv.transfer.messages import Claim, Count, Digest, EngineRef, Name, Runs, Seconds

_encoder = msgspec.msgpack.Encoder()


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's KV on P. Made by P's :class:`~pdkv.transfer.producer.Producer`; used once.

    Attributes:
        engine: the P engine and the generation that the blocks belong to.
        request_id: the request, as P knows it.
        num_tokens: tokens of the prompt.
        blocks: P's blocks, one run per KV-cache group. Empty where D registers before P has computed them (push).
        serial: no two references of one P have the same.
        valid_s: D must have asked P for the KV within this time, which P measures from when it made the reference.
        mac: of all other fields, by P's key.
    """

    engine: EngineRef
    request_id: Name
    num_tokens: Count
    blocks: Runs = ()
    serial: Count
    valid_s: Seconds
    mac: Digest

    def digest(self) -> bytes:
        """BLAKE2b over all fields but the MAC, 32 bytes."""
        unsealed = msgspec.structs.replace(self, mac=bytes(32))
        return hashlib.blake2b(_encoder.encode(unsealed), digest_size=32, person=b"pdkv-reference").digest()

    def claim(self, use: int) -> Claim:
        """What D shows P in each message of its `use` of this reference."""
        return Claim(self.digest(), self.mac, use)

    def to_params(self) -> dict[str, Any]:
        """As JSON-able values, e.g. for ``kv_transfer_params``."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params

    @classmethod
    def from_params(cls, params: Any) -> Reference:
        """Back from :meth:`to_params`, by way of others.

        Raises:
            ProtocolError: a field is missing, unknown or out of range.
        """
        try:
            return msgspec.convert(params, cls)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the transfer parameters of the request are not valid: {error}") from error
