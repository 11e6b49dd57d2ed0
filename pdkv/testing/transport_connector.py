"""Any transport as a connector: on the bench of `check_connector`, and a pattern for connectors of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pdkv.errors import TransportError
from pdkv.kvcache import GrowableKVCache, KVCacheConfig, PageSpec
from pdkv.testing.connectors import ConnectorBench
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.transport import Transfer, TransferState, Transport

if TYPE_CHECKING:
    from pdkv.memory import MemoryDriver

_TIMEOUT_S = 30.0
_BLOCKS, _CAPACITY = 12, 32
_PAGE = PageSpec(num_heads=2, num_states=4, content_bytes=100, block_size=4)


class TransportConnector:
    """Registers a cache with a transport, in the generation that the cache has."""

    registers_memory = True

    def __init__(self, transport: Transport, engine_id: str) -> None:
        self.transport = transport
        self._engine_id = engine_id
        #: What peers are told: who this is, and how it is reached. None while there is nothing to reach.
        self.published: tuple[EngineRef, bytes] | None = None

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        me = EngineRef(self._engine_id, cache.generation)
        self.transport.register(cache, me)
        self.published = me, self.transport.describe()

    def unregister_kv_cache(self) -> None:
        self.published = None
        self.transport.unregister()


class TransportConnectorBench(ConnectorBench):
    """Two caches of one process, and a transport on each side.

    Args:
        make: builds a transport; called once for each side.
        driver: where memory comes from.
        registered: `(address, nbytes)` of what a transport has registered; by default the extents of the cache of one
            whose state says that it is registered.
        reads: whether the peer reads from the owner; else it writes.
    """

    def __init__(
        self,
        make: Callable[[], Transport],
        driver: MemoryDriver,
        *,
        registered: Callable[[Transport], Sequence[tuple[int, int]]] | None = None,
        reads: bool = True,
    ) -> None:
        config = KVCacheConfig.uniform(("a", "b"), _PAGE, _CAPACITY)
        self.cache, self._peer_cache = GrowableKVCache(config, driver), GrowableKVCache(config, driver)
        for cache in (self.cache, self._peer_cache):
            cache.commit(_BLOCKS, defragment=True)
        self.transport, self._peer = make(), make()
        self.connector = self.owner = TransportConnector(self.transport, "owner")
        self._peer.register(self._peer_cache, EngineRef("peer", 1))
        self._registered = registered or self._by_state
        self.owner_is_source = reads
        self._known: EngineRef | None = None

    def _by_state(self, transport: Transport) -> Sequence[tuple[int, int]]:
        if not transport.describe_state()["registered"]:
            return ()
        return [(extent.address, extent.nbytes) for extent in self.cache.extents()]

    def registered(self) -> Sequence[tuple[int, int]]:
        return self._registered(self.transport)

    def meet(self) -> None:
        if self.owner.published is None:
            raise TransportError("the owner publishes nothing now.")
        self._known, metadata = self.owner.published
        self._peer.connect(self._known, metadata)

    def move(self, block: int, value: int) -> bytes:
        if self._known is None:
            raise TransportError("the peer has met nobody yet.")
        source, destination = (self.cache, self._peer_cache) if self.owner_is_source else (self._peer_cache, self.cache)
        if source.num_committed_blocks:
            _fill(source, block, value)
        _fill(self._peer_cache, 0, 0)
        pair = BlockPair(group=0, source=block, destination=block)
        transfer = (self._peer.read if self.owner_is_source else self._peer.write)(self._known, [pair])
        if self._wait(transfer) is not TransferState.DONE:
            raise TransportError(f"the transfer failed: {transfer.reason}")
        return b"".join(
            view[block].contiguous().view(-1).numpy().tobytes() for view in destination.committed_views().values()
        )

    def _wait(self, transfer: Transfer) -> TransferState:
        """The owner is driven by the same thread, so that it serves while the peer waits."""
        state = transfer.poll()
        while state is TransferState.RUNNING:
            self.transport.progress()
            state = transfer.poll()
        return state

    def owner_is_alive(self) -> bool:
        return True

    def close(self) -> None:
        for transport in (self._peer, self.transport):
            transport.close(timeout_s=_TIMEOUT_S)
        for cache in (self._peer_cache, self.cache):
            cache.close()


def _fill(cache: GrowableKVCache, block: int, value: int) -> None:
    for view in cache.committed_views().values():
        view[block].fill_(value)


__all__ = ["TransportConnector", "TransportConnectorBench"]
