"""A whole KV cache as numbers: layers, placements, and the segments that they amount to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import index as as_integer

from pdkv.errors import CapacityError, ConfigError, LayoutError
from pdkv.kvcache.layout import KVCacheLayout, byte_strides, growable_layouts
from pdkv.kvcache.placement import KVCacheTensor, Placement, Segment, check_config
from pdkv.kvcache.specs import Spec


@dataclass(frozen=True)
class _Region:
    """One layer of one tensor: where its block 0 begins, and how far a page reaches from there."""

    tensor: int
    layer: int
    start: int
    block_stride: int
    page_bytes: int


@dataclass(frozen=True)
class KVCacheConfig:
    """A whole KV cache: `num_blocks` blocks of the layers in `specs`, placed by `tensors` in one `layout`.

    `one_storage` tells whether all tensors share one storage, as an engine allocates it, or lie in a storage per
    segment, as :meth:`committed` describes them.

    Raises:
        CapacityError: `num_blocks` is less than one.
        ConfigError: placements and specs do not fit together; the message says where.
    """

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    specs: Mapping[str, Spec]
    layout: KVCacheLayout
    one_storage: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        object.__setattr__(self, "specs", dict(self.specs))
        if self.num_blocks < 1:
            raise CapacityError(f"a KV cache needs a capacity of at least one block, not {self.num_blocks}.")
        check_config(self)

    @classmethod
    def uniform(
        cls,
        layers: Sequence[str],
        spec: Spec,
        num_blocks: int,
        layout: KVCacheLayout = KVCacheLayout.LBNHC,
    ) -> KVCacheConfig:
        """All `layers` alike and as dense as `layout` allows."""
        if not layers:
            raise ConfigError("a KV cache needs at least one layer.")
        if num_blocks < 1:
            raise CapacityError(f"a KV cache needs a capacity of at least one block, not {num_blocks}.")
        shape = (len(layers), num_blocks, spec.num_heads, spec.num_states, spec.content_bytes)
        strides = byte_strides(layout, shape, page_bytes=spec.page_bytes_padded)
        outermost = layout.stride_order[0]
        size = strides[outermost] * shape[outermost]
        tensor = KVCacheTensor(size, tuple(layers), layer_stride=strides[0], block_stride=strides[1])
        return cls(num_blocks, (tensor,), dict.fromkeys(layers, spec), layout)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers, in the order of the placements."""
        return tuple(name for tensor in self.tensors for name in tensor.layers)

    @cached_property
    def can_grow(self) -> bool:
        """Whether a prefix of blocks lies in a prefix of every segment. Otherwise all is committed, or nothing."""
        return self.layout.is_block_compact

    @property
    def size(self) -> int:
        """Bytes of the one storage.

        Raises:
            ConfigError: each segment has a storage of its own.
        """
        if not self.one_storage:
            raise ConfigError("these placements describe one storage per segment; ask those of the whole cache.")
        return self.tensors[0].size

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The ranges that are committed from their beginnings, in address order.

        One per layer in layer-outermost layouts, one in all in block-outermost ones; ranges that overlap are one
        segment. In a layout that cannot grow the whole storage is one segment with one "block".

        Raises:
            LayoutError: tensors overlap so that a prefix of blocks would not be a prefix of bytes.
        """
        if not self.can_grow:
            return (Segment(0, self.size, self.size),)
        return tuple(self._segment(regions) for regions in self._overlapping_regions())

    def padded(self, granule: int) -> KVCacheConfig:
        """The same cache with every segment beginning on a granule, and a size of whole granules.

        No two segments then share a granule. In layer-outermost layouts this pads `layer_stride`; the pages of a layer
        stay as close together as they were.

        Raises:
            LayoutError: the layers of a tensor would no longer be a constant stride apart.
        """
        if granule <= 0:
            raise ConfigError(f"a granule has a positive size, not {granule} bytes.")
        if not self.can_grow:
            size = round_up(self.size, granule)
            return replace(self, tensors=tuple(replace(tensor, size=size) for tensor in self.tensors))
        rooms = [round_up(segment.nbytes, granule) for segment in self.segments]
        begins = list(accumulate(rooms, initial=0))
        moved: dict[tuple[int, int], tuple[int, int]] = {}
        for region in self._regions():
            index = self._segment_index(region.start)
            begin = begins[index] + region.start - self.segments[index].offset
            moved[region.tensor, region.layer] = (begin, rooms[index])
        tensors = tuple(self._moved(number, moved, sum(rooms)) for number in range(len(self.tensors)))
        return replace(self, tensors=tensors)

    def clamped(self, num_blocks: int) -> int:
        """`num_blocks`, or the capacity where that is less.

        Raises:
            CapacityError: it is negative, or no whole number.
        """
        try:
            blocks = as_integer(num_blocks)
        except TypeError:
            raise CapacityError(f"a number of blocks is a whole number, not {num_blocks!r}.") from None
        if blocks < 0:
            raise CapacityError(f"a number of blocks is at least 0, not {blocks}.")
        return min(blocks, self.num_blocks)

    def blocks_backed_by(self, sizes: Sequence[int]) -> int:
        """The most blocks that lie whole in the first `sizes` bytes of each segment; 0 in a layout that cannot grow."""
        if not self.can_grow:
            return 0
        return min(nbytes // where.block_stride for where, nbytes in zip(self.segments, sizes, strict=True))

    def prefix_bytes(self, segment: Segment, num_blocks: int) -> int:
        """Bytes from the beginning of `segment` that `num_blocks` blocks take in it, without rounding."""
        if not self.can_grow:
            return segment.nbytes if num_blocks else 0
        return num_blocks * segment.block_stride

    def segment_bytes_for(self, num_blocks: int, granule: int) -> list[int]:
        """Bytes of whole granules that `num_blocks` blocks take in each segment."""
        return [round_up(self.prefix_bytes(segment, num_blocks), granule) for segment in self.segments]

    def physical_bytes_for(self, num_blocks: int, granule: int) -> int:
        """Physical memory in bytes that `num_blocks` blocks take: ``sum(round_up(n * block_stride, granule))``."""
        return sum(self.segment_bytes_for(num_blocks, granule))

    def blocks_within(self, nbytes: int, granule: int) -> int:
        """The most blocks whose :meth:`physical_bytes_for` is at most `nbytes`; between 0 and `num_blocks`.

        Raises:
            CapacityError: `nbytes` is no whole number; nan, for one, would otherwise hold everything.
        """
        if not isinstance(nbytes, int):
            raise CapacityError(f"a budget is a whole number of bytes, not {nbytes!r}.")
        counts = range(self.num_blocks + 1)
        return max(0, bisect_right(counts, nbytes, key=lambda count: self.physical_bytes_for(count, granule)) - 1)

    def require_blocks_within(self, nbytes: int, granule: int, minimum: int = 1) -> int:
        """:meth:`blocks_within`, if that is at least `minimum`.

        Raises:
            CapacityError: the budget is too small; the message says how many bytes would do.
        """
        if minimum > self.num_blocks:
            raise CapacityError(
                f"{minimum} blocks are needed, but the KV cache has a capacity of {self.num_blocks}; reserve more."
            )
        blocks = self.blocks_within(nbytes, granule)
        if blocks < minimum:
            raise CapacityError(
                f"a budget of {nbytes} bytes holds {blocks} blocks of the KV cache, but {minimum} are needed, which "
                f"take {self.physical_bytes_for(minimum, granule)} bytes in {len(self.segments)} segments with "
                f"granules of {granule} bytes; raise the budget to that."
            )
        return blocks

    def committed_placements(self, num_blocks: int) -> tuple[Placement, ...]:
        """The first `num_blocks` blocks, each segment being a storage of exactly ``num_blocks * block_stride`` bytes.

        In layer-outermost layouts each layer becomes a tensor of its own, at offset 0 of its segment's storage. In
        block-outermost ones the tensors stay as they are and only `size` shrinks.

        Raises:
            LayoutError: fewer than all blocks, in a layout that cannot grow.
        """
        self.require_growable(num_blocks)
        placements: list[Placement] = []
        for tensor in self.tensors:
            if self.can_grow and self.layout.is_layer_compact:
                placements += self._per_layer(tensor, num_blocks)
                continue
            index = self._segment_index(tensor.offset)
            segment = self.segments[index]
            size, offset = self.prefix_bytes(segment, num_blocks), tensor.offset - segment.offset
            placements.append(Placement(index, replace(tensor, size=size, offset=offset)))
        return tuple(placements)

    def committed(self, num_blocks: int) -> KVCacheConfig:
        """:meth:`committed_placements` as a config of `num_blocks` blocks."""
        tensors = tuple(placement.tensor for placement in self.committed_placements(num_blocks))
        return KVCacheConfig(num_blocks, tensors, self.specs, self.layout, one_storage=len(self.segments) == 1)

    def require_growable(self, num_blocks: int) -> None:
        """Refuse a part of a cache whose layout has no committed prefix.

        Raises:
            LayoutError: `num_blocks` is neither none nor all, and the layout spreads pages over several places.
        """
        if self.can_grow or num_blocks in (0, self.num_blocks):
            return
        raise LayoutError(
            f"{num_blocks} of {self.num_blocks} blocks cannot be committed in layout {self.layout.name}, in which a "
            f"block lies in many places; commit all blocks at once, or use one of {growable_layouts()}."
        )

    def _regions(self) -> Iterator[_Region]:
        for number, tensor in enumerate(self.tensors):
            page_bytes = self.specs[tensor.layers[0]].dense_page_bytes
            for layer in range(len(tensor.layers)):
                start = tensor.offset + layer * tensor.layer_stride
                yield _Region(number, layer, start, tensor.block_stride, page_bytes)

    def _overlapping_regions(self) -> Iterator[list[_Region]]:
        if not self.one_storage:
            raise ConfigError("these placements describe one storage per segment; ask those of the whole cache.")
        group: list[_Region] = []
        end = 0
        for region in sorted(self._regions(), key=lambda region: region.start):
            if group and region.start >= end:
                yield group
                group = []
            group.append(region)
            # Not the last page's end: with one block the layers of a block-outermost layout must still be one segment.
            end = max(end, region.start + self.num_blocks * region.block_stride)
        yield group

    def _segment(self, regions: list[_Region]) -> Segment:
        offset = regions[0].start
        stride = max(region.block_stride for region in regions)
        for region in regions:
            if region.start - offset + region.page_bytes > stride:
                layers = self.tensors[region.tensor].layers
                raise LayoutError(
                    f"layer {layers[region.layer]!r} begins {region.start - offset} bytes into a region of other "
                    f"layers with {stride} bytes per block, so that the first blocks of both are not the first bytes; "
                    f"place the layers apart, or use a block-outermost layout such as BLHNC."
                )
        return Segment(offset, self.num_blocks * stride, stride)

    def _segment_index(self, offset: int) -> int:
        return bisect_right(self.segments, offset, key=lambda segment: segment.offset) - 1

    def _moved(self, number: int, moved: Mapping[tuple[int, int], tuple[int, int]], size: int) -> KVCacheTensor:
        tensor = self.tensors[number]
        begins = [moved[number, layer][0] for layer in range(len(tensor.layers))]
        steps = {after - before for before, after in pairwise(begins)}
        if len(steps) > 1:
            raise LayoutError(
                f"the layers from {tensor.layers[0]!r} on are no constant stride apart once their regions begin on "
                f"granules ({sorted(steps)} bytes); give them placements of their own, or use BLHNC."
            )
        only_layer_stride = moved[number, 0][1] if self.layout.is_layer_compact else tensor.layer_stride
        stride = steps.pop() if steps else only_layer_stride
        return replace(tensor, size=size, layer_stride=stride, offset=begins[0])

    def _per_layer(self, tensor: KVCacheTensor, num_blocks: int) -> Iterator[Placement]:
        for layer, name in enumerate(tensor.layers):
            start = tensor.offset + layer * tensor.layer_stride
            index = self._segment_index(start)
            segment = self.segments[index]
            nbytes = self.prefix_bytes(segment, num_blocks)
            yield Placement(index, KVCacheTensor(nbytes, (name,), nbytes, tensor.block_stride, start - segment.offset))


def round_up(nbytes: int, granule: int) -> int:
    """`nbytes` rounded up to a multiple of `granule`."""
    return -(-nbytes // granule) * granule
