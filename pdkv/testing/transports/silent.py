"""A transport whose peers need not answer, for tests of what drives transports."""

from __future__ import annotations

from typing import ClassVar

from pdkv.errors import PdkvError
from pdkv.transfer.connecting import Steps
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.inproc import InprocTransport
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.shards import HeadSlice


class SilentPeers(InprocTransport):
    """`inproc`, but for when it is connected to.

    Attributes:
        silent: engine ids that do not answer until they are taken out.
        refuses: what is said by those that then say no.
        attempts: connections that were begun.
        waiting: such that have not ended.
    """

    silent: ClassVar[set[str]] = set()
    refuses: ClassVar[dict[str, PdkvError]] = {}
    attempts = 0
    waiting = 0

    @classmethod
    def reset(cls, *silent: str) -> None:
        """As at the start, but for these, which do not answer."""
        cls.silent.clear()
        cls.silent.update(silent)
        cls.refuses.clear()
        cls.attempts = cls.waiting = 0

    def _do_connect(  # type: ignore[override]
        self, peer: EngineRef, geometry: CacheGeometry, own: bytes, timeout_s: float, heads: HeadSlice | None
    ) -> Steps[str]:
        link = super()._do_connect(peer, geometry, own, timeout_s, heads)
        SilentPeers.attempts += 1
        SilentPeers.waiting += 1
        try:
            while peer.engine_id in self.silent:
                yield
            if peer.engine_id in self.refuses:
                raise self.refuses[peer.engine_id]
            return link
        finally:
            SilentPeers.waiting -= 1
