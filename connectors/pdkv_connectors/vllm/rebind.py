"""The seam "rebind": after growth the engine runs on committed views in place of capacity views.

Views over the capacity would do for attention, which follows block tables, but not for anything that looks at a
tensor's storage or divides by its length: stock NIXL registers `untyped_storage().nbytes()` and splits regions by it,
and block copies work on the whole view. Committed views begin at the same addresses and end with the committed bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import create_kv_cache_views
from vllm.v1.worker.utils import bind_kv_cache, map_kv_caches_to_kernel_blocks

from pdkv_connectors.vllm.placement import layer_specs, with_placements

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pdkv.kvcache import GrowableKVCache


def committed_config(runner: Any, cache: GrowableKVCache) -> KVCacheConfig:
    """vLLM's config for the committed prefix, with the groups as the model runner has extended them."""
    return with_placements(runner.kv_cache_config, cache.committed_config())


def committed_views(runner: Any, cache: GrowableKVCache, config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """One view `[num_blocks, H, N, C]` a layer, by vLLM's own function, over storages of just the committed bytes."""
    specs = layer_specs(config)
    layout = runner.cache_config.get_resolved_kv_cache_layout()
    views: dict[str, torch.Tensor] = {}
    for tensor, raw in zip(config.kv_cache_tensors, cache.committed_raw(), strict=True):
        first = tensor.layers[0]
        group = next(index for index, group in enumerate(config.kv_cache_groups) if first in group.layer_names)
        kernel_block_size = runner._kernel_block_sizes[group] if group < len(runner._kernel_block_sizes) else None
        layer_views = create_kv_cache_views(
            raw, specs[first], config.num_blocks, layout, tensor, kernel_block_size=kernel_block_size
        )
        views.update(zip(tensor.layers, layer_views, strict=True))
    for layer, target in runner.shared_kv_cache_layers.items():
        views[layer] = views[target]
    return views


def rebind_v1(runner: Any, config: KVCacheConfig, views: dict[str, torch.Tensor]) -> None:
    """Model runner V1: put `views` where `initialize_kv_cache_tensors` had put the capacity views."""
    runner.kv_cache_config = config
    runner.kv_caches.clear()
    num_attn_module = 2 if runner.model_config.hf_config.model_type == "longcat_flash" else 1
    attn_groups = [group for groups in runner.attn_groups for group in groups]
    bind_kv_cache(
        views,
        runner.compilation_config.static_forward_context,
        runner.kv_caches,
        num_attn_module,
        kv_cache_groups=config.kv_cache_groups,
        layer_kv_caches=map_kv_caches_to_kernel_blocks(views, attn_groups),
    )
