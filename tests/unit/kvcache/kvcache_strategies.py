"""Caches to try the invariants on, and an independent look at the operating system's books."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from pdkv.kvcache import (
    AttentionSpec,
    GrowableKVCache,
    KVCacheConfig,
    KVCacheLayout,
    KVCacheTensor,
    MLASpec,
    PageSpec,
    Spec,
)

GRANULE = 4096
GROWABLE = [layout for layout in KVCacheLayout if layout.is_block_compact]
WHOLE_ONLY = [layout for layout in KVCacheLayout if not layout.is_block_compact]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Pages from a few bytes to several granules, few of them a multiple or a divisor of a granule."""
    dtype = draw(st.sampled_from(["float32", "bfloat16", "uint8"]))
    block_size, head_size = draw(st.integers(1, 7)), draw(st.integers(1, 90))
    kind = draw(st.sampled_from(["attention", "mla", "page"]))
    spec: Spec
    if kind == "attention":
        spec = AttentionSpec(
            draw(st.integers(1, 4)), block_size, head_size, dtype, draw(st.none() | st.integers(0, 90))
        )
    elif kind == "mla":
        spec = MLASpec(block_size, head_size, dtype)
    else:
        spec = PageSpec(draw(st.integers(1, 3)), block_size, head_size, block_size)
    if draw(st.booleans()):
        return spec
    padding = draw(st.integers(0, 300)) * spec.item_bytes
    return replace(spec, page_bytes_padded=spec.dense_page_bytes + padding)  # type: ignore[type-var]


@st.composite
def uniform_configs(draw: st.DrawFn, max_blocks: int = 9, min_blocks: int = 1) -> KVCacheConfig:
    """One tensor of equal layers."""
    layers = [f"layer.{index}" for index in range(draw(st.integers(1, 4)))]
    return KVCacheConfig.uniform(
        layers, draw(specs()), draw(st.integers(min_blocks, max_blocks)), draw(st.sampled_from(GROWABLE))
    )


@st.composite
def mixed_configs(draw: st.DrawFn, max_blocks: int = 9, min_blocks: int = 1) -> KVCacheConfig:
    """Two groups that overlay each other, or two specs of unequal pages side by side: as vLLM places hybrid models."""
    layout = draw(st.sampled_from(GROWABLE))
    blocks = draw(st.integers(min_blocks, max_blocks))
    first, second = draw(specs()), draw(specs())
    counts = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    overlay = draw(st.booleans())
    if layout.is_block_outermost:
        return block_outermost(layout, blocks, (first, second), counts, overlay=overlay)
    return overlaid(layout, blocks, first, counts) if overlay else side_by_side(layout, blocks, (first, second), counts)


def configs(max_blocks: int = 9, min_blocks: int = 1) -> st.SearchStrategy[KVCacheConfig]:
    return uniform_configs(max_blocks, min_blocks) | mixed_configs(max_blocks, min_blocks)


def block_outermost(
    layout: KVCacheLayout, blocks: int, pair: tuple[Spec, Spec], counts: tuple[int, int], *, overlay: bool
) -> KVCacheConfig:
    """Each block holds the pages of all layers of a group; groups begin at byte 0 of the block if they overlay."""
    align = 8
    pages = [-(-spec.page_bytes // align) * align for spec in pair]
    rooms = [page * count for page, count in zip(pages, counts, strict=True)]
    stride = max(rooms) if overlay else sum(rooms)
    tensors, specs_by_layer, offset = [], {}, 0
    for name, spec, page, count, room in zip("ab", pair, pages, counts, rooms, strict=True):
        layers = tuple(f"{name}.{index}" for index in range(count))
        tensors.append(KVCacheTensor(stride * blocks, layers, page, stride, offset))
        specs_by_layer |= dict.fromkeys(layers, spec)
        offset += 0 if overlay else room
    return KVCacheConfig(blocks, tuple(tensors), specs_by_layer, layout)


def overlaid(layout: KVCacheLayout, blocks: int, spec: Spec, counts: tuple[int, int]) -> KVCacheConfig:
    """Two groups of one page size in a layer-outermost layout: layer i of both shares its bytes."""
    region = spec.page_bytes * blocks
    size = region * max(counts)
    groups = [tuple(f"{name}.{index}" for index in range(count)) for name, count in zip("ab", counts, strict=True)]
    tensors = tuple(KVCacheTensor(size, layers, region, spec.page_bytes) for layers in groups)
    return KVCacheConfig(blocks, tensors, dict.fromkeys(groups[0] + groups[1], spec), layout)


def side_by_side(layout: KVCacheLayout, blocks: int, pair: tuple[Spec, Spec], counts: tuple[int, int]) -> KVCacheConfig:
    """One group of two specs in a layer-outermost layout: the regions of the first, then those of the second."""
    align = 8
    strides = [-(-spec.page_bytes // align) * align for spec in pair]
    size = sum(stride * blocks * count for stride, count in zip(strides, counts, strict=True))
    tensors, specs_by_layer, offset = [], {}, 0
    for name, spec, stride, count in zip("ab", pair, strides, counts, strict=True):
        layers = tuple(f"{name}.{index}" for index in range(count))
        tensors.append(KVCacheTensor(size, layers, stride * blocks, stride, offset))
        specs_by_layer |= dict.fromkeys(layers, spec)
        offset += stride * blocks * count
    return KVCacheConfig(blocks, tuple(tensors), specs_by_layer, layout)


@dataclass(frozen=True)
class Mapping:
    """One line of /proc/self/maps."""

    begin: int
    end: int
    permissions: str
    inode: int


def os_mappings(address: int, nbytes: int) -> list[Mapping]:
    """Lines of /proc/self/maps in the range that have memory behind them; read here, without pdkv."""
    found = []
    with open("/proc/self/maps", encoding="ascii") as lines:
        for line in lines:
            begin, end = (int(part, 16) for part in line[: line.index(" ")].split("-"))
            if begin >= address + nbytes:
                break  # the lines are in the order of addresses
            if address >= end:
                continue
            _, permissions, _, _, inode = line.split()[:5]
            if int(inode):
                found.append(Mapping(begin, end, permissions, int(inode)))
    return found


def block_bytes(view: torch.Tensor, block: int) -> torch.Tensor:
    """The content of one block of one layer, as bytes, in logical order."""
    return view[block].contiguous().view(torch.uint8)


def fill(view: torch.Tensor, block: int, value: int) -> None:
    """Make every byte of one block of one layer `value`."""
    view[block].copy_(torch.full_like(block_bytes(view, block), value).view(view.dtype).view(view[block].shape))


def committed_range(cache: GrowableKVCache, segment: int, blocks: int | None = None) -> tuple[int, int]:
    """Address and length of a segment's committed prefix."""
    where = cache.segments[segment]
    count = cache.num_committed_blocks if blocks is None else blocks
    return cache.address + where.offset, count * where.block_stride


def fill_all(cache: GrowableKVCache, value: int) -> None:
    for view in cache.views().values():
        for block in range(cache.num_committed_blocks):
            fill(view, block, value)


def holds(cache: GrowableKVCache, block: int, value: int) -> bool:
    return all(block_bytes(view, block).unique().tolist() == [value] for view in cache.views().values())
