"""vLLM's KV cache config, translated to pdkv's and back.

The field names are the same on both sides (`size, layers, layer_stride, block_stride, offset`); what differs is that
pdkv pads layer regions apart to granules, and that after growth each segment has a storage of its own.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, KVCacheTensor, UniformTypeKVCacheSpecs

from pdkv import kvcache
from pdkv.errors import ConnectorError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: Blocks of the config by which growth is tried out: enough that strides between layers and between blocks differ.
_TRIAL_BLOCKS = 64


def layer_specs(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """The spec of each layer, with group wrappers taken off."""
    specs: dict[str, KVCacheSpec] = {}
    for group in config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            specs.update(group.kv_cache_spec.kv_cache_specs)
        else:
            specs.update(dict.fromkeys(group.layer_names, group.kv_cache_spec))
    return specs


def why_not_growable(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], granule: int) -> str | None:
    """Why the cache of these layers has to stay fixed; None where it can grow.

    Tried out on a small config, made by the functions with which the engine core is going to make the real one.
    """
    planned = _plan(vllm_config, dict(specs))
    planned.kv_cache_layout = vllm_config.cache_config.kv_cache_layout
    try:
        config = to_pdkv(planned).padded(granule)
        config.require_growable(1)
    except (ConnectorError, LayoutError) as error:
        return str(error)
    return None


def _plan(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """vLLM's own placements of `_TRIAL_BLOCKS` blocks. May change `specs`, as vLLM does where it unifies them."""
    try:
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    except ImportError:  # 0.32
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

        groups = get_kv_cache_groups(vllm_config, specs)
        block_bytes = sum(spec.page_size_bytes for spec in specs.values())
        return get_kv_cache_config_from_groups(vllm_config, groups, _TRIAL_BLOCKS * block_bytes)
    builder = get_kv_cache_config_builder(vllm_config)
    groups = builder.get_kv_cache_groups(vllm_config, specs)
    return builder.get_kv_cache_config_from_groups(vllm_config, groups, num_blocks=_TRIAL_BLOCKS)


def to_pdkv(config: KVCacheConfig, interior: kvcache.Interior = "opaque") -> kvcache.KVCacheConfig:
    """pdkv's form of a config that the engine core has resolved.

    Args:
        interior: of its pages; see `page_interior.py`.

    Raises:
        ConnectorError: the model has a layer whose cache is not attention pages, or layers of several kinds.
        LayoutError: the layout has no committed views, so it cannot grow.
    """
    if len(config.kv_cache_groups) != 1:
        raise ConnectorError(
            f"this model has {len(config.kv_cache_groups)} KV cache groups (a hybrid of several kinds of layer), whose "
            "cache cannot grow yet."
        )
    specs = layer_specs(config)
    layout = kvcache.KVCacheLayout[config.kv_cache_layout or "LBNHC"]
    placed = [name for tensor in config.kv_cache_tensors for name in tensor.layers]
    return kvcache.KVCacheConfig(
        num_blocks=config.num_blocks,
        tensors=tuple(
            kvcache.KVCacheTensor(
                size=tensor.size,
                layers=tuple(tensor.layers),
                layer_stride=tensor.layer_stride,
                block_stride=tensor.block_stride,
                offset=tensor.offset,
            )
            for tensor in config.kv_cache_tensors
        ),
        specs={name: _page_spec(name, specs[name], interior) for name in placed},
        layout=layout,
    )


def _page_spec(layer: str, spec: KVCacheSpec, interior: kvcache.Interior) -> kvcache.PageSpec:
    if not isinstance(spec, AttentionSpec):
        raise ConnectorError(f"layer {layer!r} has a KV cache of kind {type(spec).__name__}, which cannot grow yet.")
    return kvcache.PageSpec(
        num_heads=spec.num_heads,
        num_states=spec.num_states,
        content_bytes=spec.state_content_size_bytes,
        block_size=spec.block_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        page_bytes_padded=spec.page_size_padded,
        interior=interior,
    )


def with_placements(config: KVCacheConfig, placements: kvcache.KVCacheConfig) -> KVCacheConfig:
    """A copy of `config` with the block count and tensors of `placements`; groups and layout are shared."""
    changed = copy(config)
    changed.num_blocks = placements.num_blocks
    changed.kv_cache_tensors = [
        KVCacheTensor(
            size=tensor.size,
            layers=list(tensor.layers),
            layer_stride=tensor.layer_stride,
            block_stride=tensor.block_stride,
            offset=tensor.offset,
        )
        for tensor in placements.tensors
    ]
    return changed
