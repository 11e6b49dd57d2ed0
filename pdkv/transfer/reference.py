"""What travels from P to D through whoever routes the request: where the KV of a prompt is."""

from __future__ import annotations

from typing import Any

import msgspec

from pdkv.errors import ProtocolError
from pdkv.transfer.messages import Count, EngineRef, Name, Runs


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's KV on P. Used once.

    Attributes:
        engine: the P engine and the generation that the blocks belong to.
        request_id: the request, as P knows it.
        num_tokens: tokens of the prompt.
        blocks: P's blocks, one run per KV-cache group. Empty where D registers before P has computed them (push).
    """

    engine: EngineRef
    request_id: Name
    num_tokens: Count
    blocks: Runs = ()

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
