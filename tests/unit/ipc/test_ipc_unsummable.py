"""What a peer says of its pages, where their words have no keys."""

from __future__ import annotations

import pytest

import pdkv
from pdkv.errors import GeometryError
from pdkv.transfer.geometry import CacheGeometry
from pdkv_connectors.ipc.legs import legs_between, require_verifiable

pytestmark = pytest.mark.cpu


def geometry(layout: str) -> CacheGeometry:
    """Of blocks of one token, in which heads that lie far apart can still be copied."""
    spec = pdkv.AttentionSpec(num_kv_heads=4, block_size=1, head_size=64, dtype="bfloat16")
    config = pdkv.KVCacheConfig.uniform(["layer.0", "layer.1"], spec, 20, pdkv.KVCacheLayout[layout])
    with pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=4096)) as cache:
        cache.commit(20)
        return CacheGeometry.of(cache)


def test_pages_of_a_peer_that_are_spread_over_memory_are_not_verified() -> None:
    spread, dense = geometry("LHBNC"), geometry("LBNHC")
    require_verifiable(legs_between(dense, spread))
    with pytest.raises(GeometryError, match="pages of the source are not runs of memory"):
        require_verifiable(legs_between(spread, dense))
