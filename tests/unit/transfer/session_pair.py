"""Two sessions of one process, over real host caches, the inproc transport and an inproc carrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transfer_pair import ManualClock

import pdkv
from pdkv.transfer import BlockRun, Compatibility, Reference
from pdkv.transfer.hosting import LocalHost
from pdkv.transfer.inproc import InprocTransport
from pdkv.transfer.inproc_carrier import InprocNetwork
from pdkv.transfer.session import Event, Role, Session, SessionSettings
from pdkv.transfer.transport import Transport

LAYERS = ["layer.0", "layer.1", "layer.2"]
SPEC = pdkv.AttentionSpec(num_kv_heads=2, block_size=16, head_size=8, dtype="float32")
COMPATIBILITY = Compatibility(
    model="m", dtype="float32", cache_dtype="auto", layout="LBNHC", block_size=16, connector="test/1"
)


def make_cache(num_blocks: int, layers: list[str] = LAYERS) -> pdkv.GrowableKVCache:
    config = pdkv.KVCacheConfig.uniform(layers, SPEC, num_blocks=num_blocks, layout=pdkv.KVCacheLayout.LBNHC)
    cache = pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=65536))
    cache.commit(num_blocks, defragment=True)
    return cache


def make_session(
    network: InprocNetwork,
    engine_id: str,
    role: Role,
    cache: pdkv.GrowableKVCache,
    *,
    clock: ManualClock | None = None,
    make_transport: Callable[[], Transport] = InprocTransport,
    **settings: Any,
) -> Session:
    host = LocalHost(make_transport, cache, engine_id, COMPATIBILITY)
    return Session(host, network.carrier(engine_id), role=role, clock=clock, settings=SessionSettings(**settings))


def fill(cache: pdkv.GrowableKVCache, blocks: list[int], seed: int) -> None:
    """Random numbers into these blocks of every layer, the same for the same seed and place in the list."""
    generator = torch.Generator().manual_seed(seed)
    for view in cache.views().values():
        for block in blocks:
            view[block] = torch.rand(view[block].shape, generator=generator)


def contents(cache: pdkv.GrowableKVCache, blocks: list[int]) -> torch.Tensor:
    return torch.stack([view[block] for view in cache.views().values() for block in blocks])


def run(*block_ids: int, first: int = 0) -> tuple[BlockRun, ...]:
    return (BlockRun(first, block_ids),)


class SessionPair:
    """P and D with a clock that moves when told to. Events are collected by :meth:`settle`."""

    def __init__(self, *, make_transport: Callable[[], Transport] = InprocTransport, **settings: Any) -> None:
        self.clock = ManualClock()
        self.network = InprocNetwork()
        self.caches = make_cache(40), make_cache(24)
        more = {"clock": self.clock, "make_transport": make_transport, **settings}
        self.prefill = make_session(self.network, "P", "prefill", self.caches[0], **more)
        self.decode = make_session(self.network, "D", "decode", self.caches[1], **more)
        self.events: dict[str, list[Event]] = {"P": [], "D": []}

    def settle(self, seconds: float = 0.0) -> None:
        """Let time pass, and both sessions work until neither has anything to do."""
        self.clock.now += seconds
        for _ in range(20):
            self.events["P"] += self.prefill.poll()
            self.events["D"] += self.decode.poll()

    def of(self, side: str, kind: type) -> list[Any]:
        return [event for event in self.events[side] if isinstance(event, kind)]

    def offer(self, request_id: str, blocks: list[int], num_tokens: int | None = None) -> Reference:
        fill(self.caches[0], blocks, seed=len(request_id))
        return self.prefill.offer(request_id, run(*blocks), num_tokens or 16 * len(blocks))

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        for cache in self.caches:
            cache.close()


def load(pair: SessionPair, request_id: str = "r", blocks: tuple[int, ...] = (7, 3, 9)) -> None:
    """A whole request, from blocks 1, 2, 3 of P into `blocks` of D."""
    reference = pair.offer(request_id, [1, 2, 3])
    pair.decode.arrived(request_id, reference, 48)
    pair.decode.allocated(request_id, run(*blocks))
    pair.settle()
