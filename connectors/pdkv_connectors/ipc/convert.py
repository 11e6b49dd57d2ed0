"""Copying and converting pages on the host: what it does, and what the kernels must equal.

Views are int8 ``[B, H, N, C]`` with C in bytes, one for each layer, over the whole of a side's committed blocks. Units
are taken and written by numpy: torch's index operations have threads meet even for one page, which takes long where
other processes have the cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdkv_connectors.ipc.hashing import WORD_NBYTES, word_keys
from pdkv_connectors.ipc.plan import PagePlan, PageShape

if TYPE_CHECKING:
    import torch

FP8_MAX = 448.0
"""The largest finite e4m3 number. What is larger, infinities included, becomes this."""

FP8_NAN = 0x7F


def page_view(raw: torch.Tensor, shape: PageShape, num_blocks: int, offset: int = 0) -> torch.Tensor:
    """int8 ``[B, H, N, C]`` over `raw` (int8, one axis), whose block 0 begins at byte `offset`."""
    sizes = (num_blocks, shape.num_heads, shape.num_states, shape.content_bytes)
    strides = (shape.block_stride, shape.head_stride, shape.state_stride, 1)
    return raw.as_strided(sizes, strides, raw.storage_offset() + offset)


def page_keys(shape: PageShape) -> npt.NDArray[np.uint32]:
    """uint32 ``[H, N, C, 2]``: the keys of the words of a page, C in words."""
    sizes = (shape.num_heads, shape.num_states, shape.content_bytes // WORD_NBYTES)
    strides = (shape.head_stride // WORD_NBYTES, shape.state_stride // WORD_NBYTES, 1)
    places = sum(index * stride for index, stride in zip(np.indices(sizes), strides, strict=True))
    keys: npt.NDArray[np.uint32] = word_keys(shape.nbytes // WORD_NBYTES)[places]
    return keys


def quantize(values: torch.Tensor, inverse_k: float, inverse_v: float) -> torch.Tensor:
    """bf16 ``[..., C]``, K in the first half of C and V in the second, as e4m3 bytes: int8 ``[..., C]``.

    Each value is multiplied by the inverse of its scale in float32 and rounded to the nearest, ties to even. What is
    beyond 448 becomes 448 with its sign, and every NaN becomes 0x7f.
    """
    import torch

    half = values.shape[-1] // 2
    scaled = values.float()
    scaled = torch.cat((scaled[..., :half] * inverse_k, scaled[..., half:] * inverse_v), dim=-1)
    is_nan = scaled.isnan()
    bytes_ = scaled.clamp(-FP8_MAX, FP8_MAX).masked_fill(is_nan, 0.0).to(torch.float8_e4m3fn).view(torch.int8)
    return bytes_.masked_fill(is_nan, FP8_NAN)


def take_units(view: torch.Tensor, units: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """int8 ``[units, heads, unit, C]``, a copy.

    Args:
        view: of :func:`unit_view`.
        units: ``block * units of a block + unit``.
    """
    per_block = view.shape[2]
    taken: npt.NDArray[np.int8] = view.numpy()[units // per_block, :, units % per_block]
    return np.ascontiguousarray(taken)


def copy_units(
    plan: PagePlan,
    units: npt.NDArray[np.int8],
    destination: torch.Tensor,
    destination_units: npt.NDArray[np.int64],
    inverses: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write units of one layer, as :func:`take_units` gave them, to their places.

    Args:
        units: int8 ``[units, heads, unit, C]``.
        destination: a view as above.
        destination_units: ``[units]``, ``block * units of a block + unit``.
        inverses: 1 / scale of K and of V; used where the plan quantizes.
    """
    import torch

    if plan.quantize:
        units = quantize(torch.from_numpy(units).view(torch.bfloat16), *inverses).numpy()
    per_block = plan.destination_units
    view = unit_view(destination, plan.unit, plan.heads.destination, plan.heads.count).numpy()
    view[destination_units // per_block, :, destination_units % per_block] = units


def column_units(view: torch.Tensor, unit: int, item_nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in units, over ``[B, H, N, C]`` whose pages hold columns and have heads outside of states.

    K is ``[B, H, units of a block, head size, unit, item]``, V ``[B, H, units of a block, unit, C / 2]``.
    """
    blocks, heads, states, content = view.shape
    halves = view.view(blocks, heads, 2, states * content // 2)
    head_size = content // 2 // item_nbytes
    keys = halves[:, :, 0].unflatten(2, (head_size, states // unit, unit, item_nbytes)).transpose(2, 3)
    return keys, halves[:, :, 1].unflatten(2, (states // unit, unit, content // 2))


def unit_view(view: torch.Tensor, unit: int, first_head: int, heads: int) -> torch.Tensor:
    """``[B, heads, units of a block, unit, C]`` over ``[B, H, N, C]``, the heads being a slice."""
    units: torch.Tensor = view.narrow(1, first_head, heads).unflatten(2, (-1, unit))
    return units
