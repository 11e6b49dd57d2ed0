"""What the bytes of a KV cache mean: layouts, specs, placements, the growable cache, and the extents to register.

Importing this package imports no torch; building views does.
"""

from __future__ import annotations

from pdkv.kvcache.cache import GrowableKVCache
from pdkv.kvcache.config import KVCacheConfig
from pdkv.kvcache.extents import Chunk, Extent, find_extent, split_at_extents
from pdkv.kvcache.layout import KVCacheLayout, parse_layout, resolve_layout
from pdkv.kvcache.placement import KVCacheTensor, Placement, Segment
from pdkv.kvcache.report import CommitReport
from pdkv.kvcache.specs import (
    AttentionSpec,
    Interior,
    MLASpec,
    PageSpec,
    SlidingWindowSpec,
    Spec,
    require_block_multiple,
)

__all__ = [
    "AttentionSpec",
    "Chunk",
    "CommitReport",
    "Extent",
    "GrowableKVCache",
    "Interior",
    "KVCacheConfig",
    "KVCacheLayout",
    "KVCacheTensor",
    "MLASpec",
    "PageSpec",
    "Placement",
    "Segment",
    "SlidingWindowSpec",
    "Spec",
    "find_extent",
    "parse_layout",
    "require_block_multiple",
    "resolve_layout",
    "split_at_extents",
]
