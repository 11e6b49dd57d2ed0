"""Transports that meet their peers in steps, of which neither who waits nor who cannot has to know more."""

from __future__ import annotations

from abc import abstractmethod

from pdkv.transfer.connecting import Attempts, Connecting, Steps, run_to_end
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.shards import HeadSlice
from pdkv.transfer.transport import Transport


class SteppedTransport(Transport):
    """Both ways to connect, by :meth:`_meet`. Who unregisters or closes has to abandon what is in `_attempts`."""

    def __init__(self) -> None:
        self._attempts = Attempts()

    def connect(
        self, peer: EngineRef, metadata: bytes, *, timeout_s: float = 5.0, heads: HeadSlice | None = None
    ) -> None:
        self._attempts.abandon(peer.engine_id)
        run_to_end(self._meet(peer, metadata, timeout_s, heads))

    def begin_connect(
        self, peer: EngineRef, metadata: bytes, *, timeout_s: float = 5.0, heads: HeadSlice | None = None
    ) -> Connecting:
        return self._attempts.begin(peer.engine_id, self._meet(peer, metadata, timeout_s, heads))

    @abstractmethod
    def _meet(self, peer: EngineRef, metadata: bytes, timeout_s: float, heads: HeadSlice | None) -> Steps[None]:
        """Connect to a peer, in steps that do not wait. Raises as :meth:`connect` does."""
