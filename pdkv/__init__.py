"""pdkv: a growable KV cache and prefill/decode connectors that work together.

Names are loaded when first used, so that ``import pdkv`` costs little and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pdkv.errors import PdkvError

if TYPE_CHECKING:
    from pdkv.kvcache import (
        AttentionSpec,
        GrowableKVCache,
        KVCacheConfig,
        KVCacheLayout,
        KVCacheTensor,
        MLASpec,
        PageSpec,
        SlidingWindowSpec,
        resolve_layout,
    )
    from pdkv.kvcache.sizing import SizingConstants, measure_kv_cache_bytes
    from pdkv.memory import MemoryDriver, open_driver

__version__ = "0.1.0"

_HOME = {
    "AttentionSpec": "pdkv.kvcache",
    "GrowableKVCache": "pdkv.kvcache",
    "KVCacheConfig": "pdkv.kvcache",
    "KVCacheLayout": "pdkv.kvcache",
    "KVCacheTensor": "pdkv.kvcache",
    "MLASpec": "pdkv.kvcache",
    "MemoryDriver": "pdkv.memory",
    "PageSpec": "pdkv.kvcache",
    "SizingConstants": "pdkv.kvcache.sizing",
    "SlidingWindowSpec": "pdkv.kvcache",
    "measure_kv_cache_bytes": "pdkv.kvcache.sizing",
    "open_driver": "pdkv.memory",
    "resolve_layout": "pdkv.kvcache",
}

__all__ = [
    "AttentionSpec",
    "GrowableKVCache",
    "KVCacheConfig",
    "KVCacheLayout",
    "KVCacheTensor",
    "MLASpec",
    "MemoryDriver",
    "PageSpec",
    "PdkvError",
    "SizingConstants",
    "SlidingWindowSpec",
    "measure_kv_cache_bytes",
    "open_driver",
    "resolve_layout",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pdkv' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
