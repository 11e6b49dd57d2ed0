"""The seam "rebind": after growth the engine runs on committed views in place of capacity views.

Views over the capacity would do for attention, which follows block tables, but not for anything that looks at a
tensor's storage or divides by its length: stock NIXL registers `untyped_storage().nbytes()` and splits regions by it,
and block copies work on the whole view. Committed views begin at the same addresses and end with the committed bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import create_kv_cache_views
from vllm.v1.worker.utils import bind_kv_cache, bind_kv_cache_to_layers, map_kv_caches_to_kernel_blocks

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
    kernel_block_sizes = _kernel_block_sizes(runner)
    for tensor, raw in zip(config.kv_cache_tensors, cache.committed_raw(), strict=True):
        first = tensor.layers[0]
        group = next(index for index, group in enumerate(config.kv_cache_groups) if first in group.layer_names)
        kernel_block_size = kernel_block_sizes[group] if group < len(kernel_block_sizes) else None
        layer_views = create_kv_cache_views(
            raw, specs[first], config.num_blocks, layout, tensor, kernel_block_size=kernel_block_size
        )
        views.update(zip(tensor.layers, layer_views, strict=True))
    for layer, target in _shared_layers(runner).items():
        views[layer] = views[target]
    return views


def _kernel_block_sizes(runner: Any) -> list[int]:
    """Tokens in a kernel block, by KV cache group; V1 has them in a private attribute, V2 in a public one."""
    return list(runner.kernel_block_sizes if hasattr(runner, "kernel_block_sizes") else runner._kernel_block_sizes)


def _shared_layers(runner: Any) -> dict[str, str]:
    """Layers without a cache of their own, and the layer whose cache they use."""
    if hasattr(runner, "shared_kv_cache_layers"):
        return dict(runner.shared_kv_cache_layers)
    from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers

    return dict(get_shared_kv_cache_layers(runner.vllm_config))


def rebind_v1(runner: Any, config: KVCacheConfig, views: dict[str, torch.Tensor]) -> None:
    """Model runner V1: put `views` where `initialize_kv_cache_tensors` had put the capacity views."""
    runner.kv_cache_config = config
    runner.kv_caches.clear()
    bind_kv_cache(
        views,
        runner.compilation_config.static_forward_context,
        runner.kv_caches,
        _attention_modules_per_layer(runner),
        kv_cache_groups=config.kv_cache_groups,
        layer_kv_caches=map_kv_caches_to_kernel_blocks(views, _attention_groups(runner)),
    )


def rebind_v2(runner: Any, config: KVCacheConfig, views: dict[str, torch.Tensor]) -> None:
    """Model runner V2: put `views` where `init_kv_cache` had put the capacity views."""
    runner.kv_cache_config = config
    runner.kv_caches[:] = list(views.values())
    layers = runner.compilation_config.static_forward_context
    bindable = {name: view for name, view in views.items() if name in layers}
    bind_kv_cache_to_layers(
        map_kv_caches_to_kernel_blocks(bindable, _attention_groups(runner)),
        layers,
        _attention_modules_per_layer(runner),
        kv_cache_groups=config.kv_cache_groups,
    )


def _attention_groups(runner: Any) -> list[Any]:
    return [group for groups in runner.attn_groups for group in groups]


def _attention_modules_per_layer(runner: Any) -> int:
    """LongCat-Flash puts two attention modules into a decoder layer; vLLM asks for their number in the same way."""
    return 2 if runner.vllm_config.model_config.hf_config.model_type == "longcat_flash" else 1
