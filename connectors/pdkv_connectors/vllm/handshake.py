"""What pdkv adds to the stock handshake: one key in the agent metadata, which a stock peer ignores.

The stock decoder skips map keys that it does not know, so a stock peer handshakes as always, and a pdkv engine is known
by the key. `generation` rises whenever registered memory or the agent was replaced: NIXL's own metadata may be the same
bytes before and after.
"""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

from pdkv.errors import ProtocolError
from pdkv.transfer.messages import PROTOCOL_VERSION, Count, EngineRef, Name, Text

KEY = "pdkv"


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a pdkv engine. Unknown fields are ignored, so that later versions can add some.

    Attributes:
        version: of the protocol that it speaks (`pdkv.transfer.messages`).
        engine_id: of its prefill side; one per rank, new at each start.
        generation: of its registered memory.
        control: ZeroMQ address where its prefill side listens, and its public key; empty where it has none.
    """

    version: Count = PROTOCOL_VERSION
    engine_id: Name
    generation: Count
    control: Text = ""

    @property
    def ref(self) -> EngineRef:
        """As messages name it."""
        return EngineRef(self.engine_id, self.generation)


def stamp(payload: NixlHandshakePayload, info: RankInfo) -> NixlHandshakePayload:
    """The payload with `info` in it; replaces an earlier stamp."""
    metadata: dict[str, Any] = msgspec.msgpack.decode(payload.agent_metadata_bytes)
    metadata[KEY] = msgspec.to_builtins(info)
    return NixlHandshakePayload(payload.compatibility_hash, msgspec.msgpack.encode(metadata))


def read_stamp(payload: NixlHandshakePayload) -> RankInfo | None:
    """What a pdkv engine said of itself; None of a stock one.

    Raises:
        ProtocolError: the key is there and not valid.
    """
    try:
        found = msgspec.msgpack.decode(payload.agent_metadata_bytes).get(KEY)
        return None if found is None else msgspec.convert(found, RankInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, AttributeError) as error:
        raise ProtocolError(f"the handshake of the peer is not valid: {error}; run the same pdkv on both.") from error
