"""The six physical orders of a KV cache, and the one place where one of them is chosen.

A cache has the logical axes ``[L, B, H, N, C]``: layer, block, KV head, token in block, content. A layout says in which
order they lie in memory, outermost first. Names and values are those of vLLM 0.30 and later, so that either side can be
looked up by the other's name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from enum import Enum

from pdkv.errors import LayoutError

logger = logging.getLogger(__name__)

#: Environment variable by which a user asks for a layout; vLLM reads the same one.
LAYOUT_VARIABLE = "VLLM_KV_CACHE_LAYOUT"

_L, _B, _H, _N, _C = range(5)

#: Older names, from when a layout named heads (H), tokens (N) and head size (D) only.
_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


class KVCacheLayout(Enum):
    """Physical order of the logical axes ``[L, B, H, N, C]``, outermost first; the value is that permutation."""

    LBHNC = (_L, _B, _H, _N, _C)
    LBNHC = (_L, _B, _N, _H, _C)
    LHBNC = (_L, _H, _B, _N, _C)
    BLHNC = (_B, _L, _H, _N, _C)
    BLNHC = (_B, _L, _N, _H, _C)
    BHLNC = (_B, _H, _L, _N, _C)

    @property
    def stride_order(self) -> tuple[int, ...]:
        """Logical axes in physical order."""
        return self.value

    @property
    def layer_view_order(self) -> tuple[int, ...]:
        """Physical order of the axes ``[B, H, N, C]`` of one layer's view."""
        return tuple(axis - 1 for axis in self.value if axis != _L)

    @property
    def is_layer_compact(self) -> bool:
        """Whether each layer is one run of memory: L is outermost."""
        return self.value[0] == _L

    @property
    def is_block_contiguous(self) -> bool:
        """Whether ``[H, N, C]`` of a block lie in logical order, so that ``view[b].is_contiguous()``."""
        return self.value[-3:] == (_H, _N, _C)

    @property
    def is_block_compact(self) -> bool:
        """Whether each page is one run of memory: L and B are the two outermost axes, in either order.

        Only then does a prefix of blocks lie in a prefix of every segment: this is what growing needs.
        """
        return set(self.value[:2]) == {_L, _B}

    @property
    def is_block_outermost(self) -> bool:
        """Whether each block of all layers is one run of memory: B is outermost."""
        return self.value[0] == _B


def growable_layouts() -> str:
    """Names of the layouts that can grow, for messages."""
    return ", ".join(layout.name for layout in KVCacheLayout if layout.is_block_compact)


def byte_strides(
    layout: KVCacheLayout,
    shape: tuple[int, int, int, int, int],
    *,
    layer_stride: int | None = None,
    block_stride: int | None = None,
    page_bytes: int | None = None,
) -> tuple[int, int, int, int, int]:
    """Strides in bytes for the logical axes ``[L, B, H, N, C]``, `shape` being in the same order with C in bytes.

    Every axis is as dense as the ones inside it allow. `layer_stride` and `block_stride` fix a stride instead.
    `page_bytes` is the room for one page where that is more than its dense size; it needs a layout whose pages are runs
    of memory, or a single head.

    Raises:
        LayoutError: `page_bytes` was given for a layout that interleaves heads with layers or blocks.
    """
    order = layout.stride_order
    inner_page_axis = max(order.index(_L), order.index(_B))
    if page_bytes is not None and any(shape[axis] != 1 for axis in order[:inner_page_axis] if axis not in (_L, _B)):
        raise LayoutError(
            f"layout {layout.name} spreads a page over several places, so that its pages cannot be padded to "
            f"{page_bytes} bytes; use one of {growable_layouts()}."
        )
    fixed = {_L: layer_stride, _B: block_stride}
    strides = [0] * 5
    stride = 1
    for position in range(4, -1, -1):
        axis = order[position]
        if position == inner_page_axis and page_bytes is not None:
            stride = max(stride, page_bytes)
        strides[axis] = fixed.get(axis) or stride
        stride = strides[axis] * shape[axis]
    return strides[0], strides[1], strides[2], strides[3], strides[4]


def parse_layout(name: str | KVCacheLayout) -> KVCacheLayout:
    """The layout called `name`; NHD and HND are understood as LBNHC and LBHNC.

    Raises:
        LayoutError: there is no such layout.
    """
    if isinstance(name, KVCacheLayout):
        return name
    upper = name.strip().upper()
    try:
        return KVCacheLayout[_ALIASES.get(upper, upper)]
    except KeyError:
        known = ", ".join(layout.name for layout in KVCacheLayout)
        raise LayoutError(f"there is no KV cache layout {name!r}; use one of {known}.") from None


def resolve_layout(
    *,
    override: str | KVCacheLayout | None = None,
    backend: str | KVCacheLayout | Iterable[str | KVCacheLayout] | None = None,
    connector: str | KVCacheLayout | None = None,
    environ: Mapping[str, str] | None = None,
    growable: bool = True,
) -> KVCacheLayout:
    """Choose the layout; nothing else does.

    In this order: `override`, which tests use; what the attention `backend` requires (one layout, or those that it
    accepts, best first); the environment variable ``VLLM_KV_CACHE_LAYOUT``; what the `connector` prefers; ``LBNHC``.
    The override and the backend are requirements. The variable and the connector are preferences: one that the backend
    does not accept, or that cannot grow where `growable` is set, is dropped with a warning.

    Args:
        environ: where to look for the variable; the process's environment if None.
        growable: the cache will be committed in steps, so that only block-compact layouts will do.

    Raises:
        LayoutError: a requirement cannot be met, or a name is unknown.
    """
    allowed = _allowed_layouts(backend, growable)
    if override is not None:
        layout = parse_layout(override)
        if layout not in allowed:
            raise LayoutError(
                f"layout {layout.name} was required, but only {_names(allowed)} will do "
                f"for this attention backend{' and a growing cache' if growable else ''}; require one of those."
            )
        return layout
    variable = (os.environ if environ is None else environ).get(LAYOUT_VARIABLE) or None
    for source, wish in ((f"environment variable {LAYOUT_VARIABLE}", variable), ("KV connector", connector)):
        if wish is None:
            continue
        layout = parse_layout(wish)
        if layout in allowed:
            return layout
        logger.warning(
            "The %s asks for KV cache layout %s, which is not among those possible here (%s); it is ignored.",
            source,
            layout.name,
            _names(allowed),
        )
    return KVCacheLayout.LBNHC if KVCacheLayout.LBNHC in allowed else allowed[0]


def _allowed_layouts(
    backend: str | KVCacheLayout | Iterable[str | KVCacheLayout] | None, growable: bool
) -> list[KVCacheLayout]:
    if backend is None:
        accepted = list(KVCacheLayout)
    elif isinstance(backend, str | KVCacheLayout):
        accepted = [parse_layout(backend)]
    else:
        accepted = [parse_layout(name) for name in backend]
    allowed = [layout for layout in accepted if layout.is_block_compact or not growable]
    if not allowed:
        raise LayoutError(
            f"the attention backend requires {_names(accepted) or 'no layout at all'}, in which a cache cannot grow; "
            f"use a backend that accepts one of {growable_layouts()}."
        )
    return allowed


def _names(layouts: Iterable[KVCacheLayout]) -> str:
    return ", ".join(layout.name for layout in layouts)
