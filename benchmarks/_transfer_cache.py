"""The caches of the benchmark of transfers, filled so that every word tells where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _plain_memory import PLAIN, open_plain_driver

from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig, KVCacheLayout
from pdkv.memory import MemoryDriver, open_driver

HEADS, HEAD_SIZE, DTYPE = 8, 64, "bfloat16"
PAGE_NBYTES_OF_TOKEN = HEADS * 2 * HEAD_SIZE * 2  # 2 KiB: a block of 16 tokens is 32 KiB


def _open(driver: str) -> MemoryDriver:
    return open_plain_driver() if driver == PLAIN else open_driver(driver)


def build(driver: str, *, layers: int, blocks: int, tokens: int = 16, layout: str = "LBHNC") -> GrowableKVCache:
    """A committed cache; each of its pages is `tokens` times 2 KiB.

    Args:
        driver: of :func:`pdkv.memory.open_driver`, or :data:`_plain_memory.PLAIN`.
    """
    spec = AttentionSpec(HEADS, tokens, HEAD_SIZE, DTYPE)
    names = [f"layer.{index}" for index in range(layers)]
    config = KVCacheConfig.uniform(names, spec, blocks, KVCacheLayout[layout])
    cache = GrowableKVCache(config, _open(driver))
    cache.commit(blocks, defragment=True)
    return cache


def fill(cache: GrowableKVCache, tokens: int = 16) -> None:
    """Give every word the number of its layer, of its unit of `tokens` tokens, and of its place in that."""
    for layer, units in enumerate(_units(cache, tokens)):
        for first in range(0, len(units), 512):
            part = units[first : first + 512]
            part.copy_(_pattern(layer, torch.arange(first, first + len(part), device=part.device), part))
    cache.driver.synchronize()


def require_moved(cache: GrowableKVCache, source: Sequence[int], destination: Sequence[int], tokens: int = 16) -> None:
    """Look whether units of `tokens` tokens hold what the owner's units were filled with.

    Raises:
        SystemExit: they do not.
    """
    cache.driver.synchronize()
    for layer, units in enumerate(_units(cache, tokens)):
        for first in range(0, len(source), 512):
            place = torch.tensor(destination[first : first + 512], device=units.device)
            found = units[place]
            wanted = _pattern(layer, torch.tensor(source[first : first + 512], device=units.device), found)
            if not torch.equal(found, wanted):
                raise SystemExit(f"transfer: wrong bytes in layer {layer}")


def _units(cache: GrowableKVCache, tokens: int) -> list[torch.Tensor]:
    """int64 ``[units, H, tokens, words]`` of each layer; a view where blocks have so many tokens, else a copy."""
    found = []
    for view in cache.committed_views().values():
        words = view.view(torch.int64)
        if view.shape[2] != tokens:
            words = words.unflatten(2, (-1, tokens)).transpose(1, 2).flatten(0, 1)
        found.append(words)
    return found


def _pattern(layer: int, units: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    inside = torch.arange(like[0].numel(), device=units.device).view(like.shape[1:])
    return inside + (units << 20).view(-1, 1, 1, 1) + (layer << 48)
