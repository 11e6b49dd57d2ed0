"""Transports with one mistake in what they know: registrations, generations, peers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from wrong_transport import Wrong, caught_by

from pdkv.errors import StateError, TransportError
from pdkv.kvcache import GrowableKVCache
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.transport import Transfer, TransferState


@caught_by("keeps_to_what_was_committed_when_it_registered")
class FollowsTheCacheOnItsOwn(Wrong):
    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        known = self._connections.find(peer.engine_id)
        if known is not None:
            fresh = self.find(known.link).cache
            assert fresh is not None
            self._connections.add(Connection(known.peer, CacheGeometry.of(fresh), known.link))
        return super().read(peer, pairs)


@caught_by("registers_once_and_again_after_unregistering")
class RegistersOverWhatWas(Wrong):
    def register(self, cache: GrowableKVCache, engine: EngineRef, *, groups: Any = None) -> None:
        self.unregister()
        super().register(cache, engine, groups=groups)


@caught_by("registers_once_and_again_after_unregistering")
class UnregistersOnce(Wrong):
    def unregister(self) -> None:
        self._require_registered()
        super().unregister()

    def close(self, *, timeout_s: float = 5.0) -> None:
        with suppress(StateError):
            super().close(timeout_s=timeout_s)


@caught_by("unregister_is_a_fence")
class StaysReachable(Wrong):
    """Its peers still reach what was registered; that the memory is gone, they find out by touching it."""

    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        transfer = super().read(peer, pairs)
        known = self._connections.find(peer.engine_id)
        with suppress(TransportError):
            self.find("" if known is None else known.link)
            return transfer
        transfer.end(TransferState.DONE)  # type: ignore[attr-defined]
        return transfer


@caught_by("serves_again_in_a_new_generation")
class GoesBackToAnOlderGeneration(Wrong):
    def connect(self, peer: EngineRef, metadata: bytes, **options: Any) -> None:
        known = self._connections.find(peer.engine_id)
        if known is None or known.peer.generation <= peer.generation:
            super().connect(peer, metadata, **options)


@caught_by("serves_again_in_a_new_generation")
class KeepsTheOldGenerationToo(Wrong):
    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        known = self._connections.find(peer.engine_id)
        newer = known is not None and known.peer.generation > peer.generation
        return super().read(known.peer if known is not None and newer else peer, pairs)


@caught_by("disconnects_and_connects_again")
class KeepsWhoWasDisconnected(Wrong):
    def disconnect(self, engine_id: str) -> None:
        return


@caught_by("disconnects_and_connects_again")
class DisconnectsOnlyWhomItKnows(Wrong):
    def disconnect(self, engine_id: str) -> None:
        if self._connections.find(engine_id) is None and not self._closed and self._connections.all() == ():
            raise StateError(f"{engine_id} is not connected")
        super().disconnect(engine_id)

    def connect(self, peer: EngineRef, metadata: bytes, **options: Any) -> None:
        with suppress(StateError):
            super().connect(peer, metadata, **options)


@caught_by("lets_a_running_transfer_end_when_its_peer_is_disconnected")
class ForgetsTransfersOfWhoWasDisconnected(Wrong):
    def disconnect(self, engine_id: str) -> None:
        super().disconnect(engine_id)
        for transfer in list(self._running):
            transfer.end(TransferState.DONE)
