"""What a user sees through views of the cache, and which layouts have them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kvcache_strategies import GRANULE, WHOLE_ONLY

from pdkv.errors import LayoutError
from pdkv.kvcache import GrowableKVCache, KVCacheConfig, KVCacheLayout, PageSpec

pytestmark = pytest.mark.cpu

OpenCache = Callable[..., GrowableKVCache]


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_committed_views_show_the_same_memory_as_views(layout: KVCacheLayout, open_cache: OpenCache) -> None:
    cache = open_cache(KVCacheConfig.uniform(("a", "b"), PageSpec(2, 3, 100, 3), 30, layout))
    cache.commit(11 if layout.is_block_compact else 30)
    whole, committed = cache.views(), cache.committed_views()
    for number, name in enumerate(("a", "b")):
        assert committed[name].shape[0] == cache.num_committed_blocks
        assert committed[name].stride() == whole[name].stride()
        assert committed[name].data_ptr() == whole[name].data_ptr()
        committed[name].fill_(number + 1)
        assert torch.equal(whole[name][: cache.num_committed_blocks], committed[name])


def test_storages_of_committed_views_begin_at_the_segment_and_end_with_the_last_block(cache: GrowableKVCache) -> None:
    cache.commit(5)
    for number, view in enumerate(cache.committed_views().values()):
        storage = view.untyped_storage()
        assert storage.data_ptr() == cache.address + cache.segments[number].offset
        assert storage.nbytes() == 5 * 1152 < 2 * GRANULE
    assert [tensor.size for tensor in cache.committed_config().tensors] == [5 * 1152] * 3
    assert [raw.numel() for raw in cache.committed_raw()] == [5 * 1152] * 3


def test_layers_of_a_block_outermost_cache_share_one_committed_storage(open_cache: OpenCache) -> None:
    cache = open_cache(KVCacheConfig.uniform(("a", "b"), PageSpec(2, 3, 100, 3), 30, KVCacheLayout.BLHNC))
    cache.commit(5)
    storages = {
        (v.untyped_storage().data_ptr(), v.untyped_storage().nbytes()) for v in cache.committed_views().values()
    }
    assert storages == {(cache.address, 5 * 1200)}


@pytest.mark.parametrize("layout", WHOLE_ONLY)
def test_a_layout_that_cannot_grow_is_committed_whole_or_not_at_all(
    layout: KVCacheLayout, open_cache: OpenCache
) -> None:
    cache = open_cache(KVCacheConfig.uniform(("a", "b"), PageSpec(2, 3, 100, 3), 30, layout))
    with pytest.raises(LayoutError, match=f"{layout.name}.*one of LBHNC"):
        cache.commit(29)
    assert cache.physical_bytes == 0
    assert cache.commit(30).blocks == 30
    assert sum(extent.nbytes for extent in cache.extents()) == cache.bytes_reserved
    with pytest.raises(LayoutError):
        cache.commit(1, shrink=True)
    cache.release_physical()
    assert cache.recommit().blocks == 30


def test_the_raw_tensor_spans_the_reservation(cache: GrowableKVCache) -> None:
    raw = cache.raw_tensor()
    assert (raw.dtype, raw.numel(), raw.data_ptr()) == (torch.int8, cache.bytes_reserved, cache.address)


def test_chunk_offsets_count_from_the_segment(cache: GrowableKVCache) -> None:
    cache.commit(3)
    cache.commit(12)
    assert [(chunk.offset, chunk.nbytes) for chunk in cache.chunks(2)] == [(0, GRANULE), (GRANULE, 3 * GRANULE)]
