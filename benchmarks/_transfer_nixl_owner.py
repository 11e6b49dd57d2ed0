"""P of the benchmark of transfers over NIXL: a process whose caches others read. Started, never imported."""

from __future__ import annotations

import sys
from typing import Any

from _transfer_cache import build, fill

from pdkv.testing.child import serve
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.nixl.settings import NixlSettings
from pdkv_connectors.nixl.transport import NixlTransport


class Owner:
    """Any number of caches, each with an agent of its own."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._transports: list[NixlTransport] = []

    def idle(self) -> None:
        for transport in self._transports:
            transport.progress()

    def do_build(self, name: str, variables: dict[str, str], verify: bool = False, **shape: Any) -> str:
        """Build, fill, register, and offer all blocks where sums are kept; the metadata to connect with."""
        cache = build(self._driver, **shape)
        fill(cache)
        transport = NixlTransport(NixlSettings(probe="never", variables=variables), verify=verify)
        transport.register(cache, EngineRef(name, 1))
        transport.offer(range(cache.num_committed_blocks))
        self._transports.append(transport)
        return transport.describe().hex()

    def do_close(self) -> None:
        for transport in self._transports:
            cache = transport.cache
            transport.close()
            if cache is not None:
                cache.close()
        self._transports.clear()


if __name__ == "__main__":
    owner = Owner(sys.argv[2])
    try:
        serve(owner, int(sys.argv[1]), owner.idle, idle_interval_s=0.0005)
    finally:
        owner.do_close()
