"""Which failures are refusals of what a request said of its KV, and what HTTP has for them.

A client, or whoever routes, sent ``kv_transfer_params`` that cannot be used (again): that is no failure of this engine,
and sending the same once more will not help. All other failures stay 500.

========================  ======  ====================================================================
failure                   status  what was wrong with the reference
========================  ======  ====================================================================
malformed                 400     it is not one
forged, bad_blocks        400     prefill did not issue it, or it is of another prompt
replayed                  409     it was used before
expired, lease_lost       410     it came too late: prefill keeps the blocks no more
wrong_engine,             410     the engine, or the memory, that it is of is gone
stale_generation
========================  ======  ====================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdkv.errors import ProtocolError
from pdkv.transfer import FailCode

#: Beside the codes of `pdkv.transfer`: what was sent never became a reference.
MALFORMED = "malformed"
#: The error's ``type`` in the answer.
KIND = "kv_reference_refused"
_STATUSES: Mapping[str, int] = {
    MALFORMED: 400,
    FailCode.FORGED: 400,
    FailCode.BAD_BLOCKS: 400,
    FailCode.REPLAYED: 409,
    FailCode.EXPIRED: 410,
    FailCode.LEASE_LOST: 410,
    FailCode.WRONG_ENGINE: 410,
    FailCode.STALE_GENERATION: 410,
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a client is told. `code`: of the failure."""

    code: str
    reason: str

    @property
    def status(self) -> int:
        return _STATUSES[self.code]

    @property
    def message(self) -> str:
        """One sentence."""
        return (
            f"the KV that kv_transfer_params refer to cannot be had ({self.code}: {self.reason.rstrip('.')}); have "
            "prefill compute the prompt again, and send what it answers."
        )


def require_one_way(params: Mapping[str, Any], role: str) -> None:
    """Refuse a request that an engine could only half serve, and would hold blocks for, without an end.

    Args:
        params: `kv_transfer_params`.
        role: "kv_producer", "kv_consumer" or "kv_both".

    Raises:
        ProtocolError: its KV is to come and to be handed over, or to come to an engine that only prefills.
    """
    if not params.get("do_remote_prefill"):
        return
    if params.get("do_remote_decode"):
        raise ProtocolError(
            "do_remote_prefill and do_remote_decode are both set; a request loads KV or hands it over: set one of them."
        )
    if role == "kv_producer":
        raise ProtocolError(
            "do_remote_prefill is set and this engine is a kv_producer, which loads no KV; send the request to decode."
        )


def refusal_of(code: str, reason: str) -> Refusal | None:
    """What a failure is to the client; None where it is this engine's, a peer's or the link's."""
    return Refusal(str(code), reason) if is_refusal(code) else None


def is_refusal(code: str) -> bool:
    """Whether that is the word for a refusal."""
    return code in _STATUSES
