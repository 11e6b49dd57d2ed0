"""D of the rows of ipc, on the host and on GPUs, and the shape of what it reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from _transfer_cache import PAGE_NBYTES_OF_TOKEN

from pdkv.kvcache import GrowableKVCache
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.ipc import BlockColumns, IpcTransport

LAYERS = 32
TOKENS = 16
BLOCK_NBYTES = LAYERS * TOKENS * PAGE_NBYTES_OF_TOKEN  # 1 MiB: 32 KiB in each layer
TIMEOUT_S = 20.0


class Reader:
    """D: a transport over a cache of its own or shared, connected to the owner."""

    def __init__(self, cache: GrowableKVCache, owner: dict[str, Any], **options: Any) -> None:
        self.transport = IpcTransport(**options)
        self.transport.register(cache, EngineRef("reader", 1))
        self.peer = EngineRef("owner", owner["generation"])
        self.transport.connect(self.peer, bytes.fromhex(owner["metadata"]), timeout_s=TIMEOUT_S)

    def read(self, pairs: BlockColumns) -> None:
        transfer = self.transport.read(self.peer, pairs)
        if transfer.wait(TIMEOUT_S) != "done":
            raise SystemExit(f"transfer: {transfer.reason}")


def scattered(units: int, count: int, seed: int) -> np.ndarray[Any, Any]:
    """`count` of `units` ids at random."""
    return np.random.default_rng(seed).permutation(units)[:count].astype(np.int32)
