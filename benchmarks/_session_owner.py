"""P of the benchmark of sessions: a process that offers blocks, and else sleeps. Started, never imported."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

from _transfer_cache import build, fill

from pdkv.registry import find_transport
from pdkv.testing.child import serve
from pdkv.transfer import BlockRun, Compatibility, LocalHost, Session
from pdkv.transfer.sidechannel import SideChannel, SideChannelSettings

COMPATIBILITY = Compatibility(model="m", dtype="", cache_dtype="", layout="", block_size=16, connector="benchmark")


def make_session(transport: str, name: str, role: Any, peers: str = "") -> Session:
    """A session over a cache of 32 layers on the host, with a thread of its own."""
    cache = build("host", layers=32, blocks=64)
    fill(cache)
    host = LocalHost(find_transport(transport), cache, name, COMPATIBILITY)
    channel = SideChannel(name, SideChannelSettings.from_values(peers=peers))
    return Session(host, channel, role=role)


class Owner:
    """One session."""

    def __init__(self, transport: str) -> None:
        self.session = make_session(transport, "P", "prefill")
        self.session.start()

    def do_address(self) -> str:
        return str(self.session.carrier.address)  # type: ignore[attr-defined]

    def do_offer(self, request_id: str, blocks: list[int]) -> dict[str, Any]:
        """The reference, as D gets it."""
        self.session.poll()
        return self.session.offer(request_id, [BlockRun(0, tuple(blocks))], 16 * len(blocks)).to_params()

    def do_idle_cores(self, seconds: float) -> float:
        """Cores that this process takes while nothing happens."""
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(seconds)
        after = resource.getrusage(resource.RUSAGE_SELF)
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds


if __name__ == "__main__":
    owner = Owner(sys.argv[2])
    try:
        serve(owner, int(sys.argv[1]), lambda: None)
    finally:
        owner.session.close()
