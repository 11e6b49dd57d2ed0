"""P of the row of Mooncake: a process whose cache Mooncake lets others read. Started, never imported."""

from __future__ import annotations

import sys
from typing import Any

from _transfer_cache import build, fill
from mooncake.engine import TransferEngine

from pdkv.testing.child import serve


class Owner:
    """One cache."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._engine = TransferEngine()
        self._cache: Any = None

    def do_build(self, **shape: Any) -> dict[str, Any]:
        """Build, fill, register; how to reach it."""
        self._cache = build(self._driver, **shape)
        fill(self._cache)
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise SystemExit("Mooncake did not start")
        if self._engine.register_memory(self._cache.address, self._cache.bytes_reserved):
            raise SystemExit("Mooncake did not register the cache")
        return {"address": self._cache.address, "server": f"127.0.0.1:{self._engine.get_rpc_port()}"}


if __name__ == "__main__":
    serve(Owner(sys.argv[2]), int(sys.argv[1]), lambda: None)
