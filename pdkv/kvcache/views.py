"""Tensors over a storage, one per layer, as the placements say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pdkv.kvcache.placement import KVCacheTensor, Placement, tensor_strides

if TYPE_CHECKING:
    import torch

    from pdkv.kvcache.config import KVCacheConfig


def all_views(raws: Iterable[torch.Tensor], config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """:func:`layer_views` of all placements of `config`, one tensor of `raws` for each."""
    views: dict[str, torch.Tensor] = {}
    for raw, tensor in zip(raws, config.tensors, strict=True):
        views.update(layer_views(raw, config, tensor))
    return views


def segment_raws(
    placements: Iterable[Placement], open_segment: Callable[[int, int], torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The storage of each placement, int8; those of one segment share it. `open_segment` takes its index and bytes."""
    raws: dict[int, torch.Tensor] = {}
    found = []
    for placement in placements:
        if placement.segment not in raws:
            raws[placement.segment] = open_segment(placement.segment, placement.tensor.size)
        found.append(raws[placement.segment])
    return tuple(found)


def layer_views(raw: torch.Tensor, config: KVCacheConfig, tensor: KVCacheTensor) -> dict[str, torch.Tensor]:
    """``{layer: [num_blocks, H, N, C]}`` over the int8 tensor `raw`, for the layers of one placement.

    C counts elements of the spec's dtype, bytes where it has none. No memory is touched. Shape, strides and address are
    those of vLLM 0.32's ``create_kv_cache_views`` for the same placement.
    """
    import torch

    shape, strides = tensor_strides(config, tensor)
    begin = raw.storage_offset() + tensor.offset
    dtype = config.specs[tensor.layers[0]].dtype
    views = {}
    for layer, name in enumerate(tensor.layers):
        view = torch.as_strided(raw, shape[1:], strides[1:], begin + layer * strides[0])
        views[name] = view if dtype is None else view.view(getattr(torch, str(dtype)))
    return views
