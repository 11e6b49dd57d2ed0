"""P of the test of a silent peer: a session over ipc whose process stops when D connects. Started, never imported."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pdkv
from pdkv.testing.child import serve
from pdkv.transfer import BlockRun, Compatibility, LocalHost, Session
from pdkv.transfer.sidechannel import SideChannel, SideChannelSettings
from pdkv_connectors.ipc import IpcTransport
from pdkv_connectors.ipc.owner import Owner


def make_session(name: str, role: Any, peers: str = "") -> Session:
    """A session with its thread to be started, a real side channel, and a cache of 12 blocks."""
    spec = pdkv.AttentionSpec(num_kv_heads=2, block_size=16, head_size=8, dtype="float32")
    config = pdkv.KVCacheConfig.uniform(["a", "b"], spec, 12, pdkv.KVCacheLayout.LBNHC)
    cache = pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=65536))
    cache.commit(12)
    like = Compatibility("m", "float32", "auto", "LBNHC", 16, "test/1")
    channel = SideChannel(name, SideChannelSettings.from_values(peers=peers))
    return Session(LocalHost(IpcTransport, cache, name, like), channel, role=role)


def stop(self: Owner) -> None:
    """In the place of letting a peer in: no thread of the process runs from here on."""
    os.kill(os.getpid(), signal.SIGSTOP)


class Stopping:
    """One session."""

    def __init__(self) -> None:
        self.session = make_session("P", "prefill")
        self.session.start()

    def do_address(self) -> str:
        return str(self.session.carrier.address)  # type: ignore[attr-defined]

    def do_offer(self, request_id: str, blocks: list[int]) -> dict[str, Any]:
        """The reference, as D gets it."""
        return self.session.offer(request_id, [BlockRun(0, tuple(blocks))], 16 * len(blocks)).to_params()


if __name__ == "__main__":
    Owner._accept = stop  # type: ignore[method-assign]
    serve(Stopping(), int(sys.argv[1]), lambda: None)
