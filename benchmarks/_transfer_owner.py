"""P of the benchmark of transfers: a process whose cache others read. Started, never imported."""

from __future__ import annotations

import sys
from typing import Any

from _transfer_cache import build, fill

from pdkv.kvcache import GrowableKVCache
from pdkv.testing.child import serve
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.ipc import IpcTransport


class Owner:
    """One cache at a time, registered with an ipc transport that sums and offers all of its blocks."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._cache: GrowableKVCache | None = None
        self._transport: IpcTransport | None = None
        self._generation = 0

    def idle(self) -> None:
        if self._transport is not None:
            self._transport.progress()

    def do_build(self, **shape: Any) -> dict[str, Any]:
        """Build, fill, register, offer; how to reach it."""
        self.do_close()
        self._cache = build(self._driver, **shape)
        fill(self._cache)
        self._transport = IpcTransport()
        self._generation += 1
        engine = EngineRef("owner", self._generation)
        self._transport.register(self._cache, engine)
        self._transport.offer(list(range(self._cache.num_committed_blocks)))
        while self._transport.num_offers_pending:
            self._transport.progress()
        return {"generation": self._generation, "metadata": self._transport.describe().hex()}

    def do_close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._cache is not None:
            self._cache.close()
        self._transport = self._cache = None


if __name__ == "__main__":
    owner = Owner(sys.argv[2])
    try:
        serve(owner, int(sys.argv[1]), owner.idle)
    finally:
        owner.do_close()
