"""What a peer must know of a KV cache to find its bytes, small enough for a handshake.

All offsets are in bytes, relative to the first address of the cache's reservation (`base`). Layers of one shape, a
constant stride apart, are one entry, and so are extents: 80 uniform layers take some 150 bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from pdkv.errors import ConfigError, ProtocolError, StateError
from pdkv.kvcache.specs import Interior
from pdkv.transfer.blocks import MAX_GROUPS
from pdkv.transfer.unpacking import unpack

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

MAX_LAYERS = 65_536
MAX_RUNS = 65_536  # a cache grown in small steps, never defragmented, has an extent per step
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**56)]
Stride = Annotated[int, msgspec.Meta(ge=-(2**56), le=2**56)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**56)]
Number = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Text = Annotated[str, msgspec.Meta(max_length=512)]


class ByteRange(NamedTuple):
    """`nbytes` bytes from `offset`, relative to the reservation's first address."""

    offset: int
    nbytes: int


class LayerRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Layers of one shape, a constant stride apart, of one KV-cache group.

    Byte 0 of head h, state n of block b of layer i is at ``offset + i * layer_stride + b * block_stride +
    h * head_stride + n * state_stride``; each state of a head is `content_nbytes` bytes that lie side by side.

    Attributes:
        num_heads, num_states, content_nbytes: the page ``[H, N, C]``, C in bytes.
        block_size: tokens of a block; as many as `num_states` unless one state stands for several tokens.
        dtype: torch's name of the element type; "" for pages of bytes.
        interior: how a head's bytes lie; only where it is "tokens" are the states where they are said to be.
        segment, segment_step: layer i lies in segment ``segment + i * segment_step``.
    """

    group: Index
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    num_heads: Number
    num_states: Number
    content_nbytes: Number
    block_size: Number
    dtype: Text
    segment: Index
    segment_step: Stride
    offset: Offset
    layer_stride: Stride
    block_stride: Size
    head_stride: Size
    state_stride: Size
    interior: Interior = "tokens"

    @property
    def page_nbytes(self) -> int:
        """Bytes of one block of one layer, without padding."""
        return self.num_heads * self.num_states * self.content_nbytes

    @property
    def piece_nbytes(self) -> int:
        """Length of the pieces, all equal, in which a page lies; :attr:`page_nbytes` where it is one run of memory."""
        nbytes = self.content_nbytes
        for size, stride in reversed(self._axes):
            if stride != nbytes:
                break
            nbytes *= size
        return nbytes

    def piece_offsets(self) -> tuple[int, ...]:
        """Where the pieces of a page begin, relative to the page, in memory order."""
        offsets, nbytes, piece = [0], self.page_nbytes, self.piece_nbytes
        for size, stride in self._axes:
            if nbytes == piece:
                break
            offsets = [offset + index * stride for offset in offsets for index in range(size)]
            nbytes //= size
        return tuple(offsets)

    @property
    def heads_outside(self) -> bool | None:
        """Whether heads are the outer axis of a page and states the inner one; None where only one of them is there."""
        return None if 1 in (self.num_heads, self.num_states) else self.head_stride > self.state_stride

    @property
    def _axes(self) -> tuple[tuple[int, int], ...]:
        """``(size, stride)`` of heads and states as far as there are several, outermost first."""
        axes = [(self.num_heads, self.head_stride), (self.num_states, self.state_stride)]
        return tuple(sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[1]))

    def part(self, first: int, count: int) -> LayerRun:
        """Layers ``first..first+count-1`` of the run."""
        return msgspec.structs.replace(
            self,
            count=count,
            segment=self.segment + first * self.segment_step,
            offset=self.offset + first * self.layer_stride,
        )


class ExtentRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`count` extents of `nbytes` bytes, `stride` bytes apart, the first at `offset`."""

    offset: Offset
    nbytes: Size
    stride: Stride
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_RUNS)]


class GroupNames(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The layers of a KV-cache group, in the order of its runs: how many, the first one's name, a hash of all names."""

    num_layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    first: Text
    digest: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]

    @classmethod
    def of(cls, names: Sequence[str]) -> GroupNames:
        return cls(len(names), names[0][:512], blake2b("\0".join(names).encode(), digest_size=8).digest())


class CacheGeometry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A committed KV cache as a peer sees it.

    Attributes:
        layout: name of the :class:`pdkv.kvcache.KVCacheLayout`, for messages; strides say where bytes are.
        driver: name of the memory driver: "host", "cuda", "hip".
        device_id: device number as transports count it; 0 on the host.
        base: first address of the reservation in its process.
        num_blocks: committed blocks; ids ``0..num_blocks-1`` may be named.
        groups: one per KV-cache group.
        layers: runs of layers, group by group, in the order of the group's layers.
        extent_runs: see :meth:`extents`.
    """

    layout: Text
    driver: Text
    device_id: Index
    base: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    num_blocks: Number
    groups: Annotated[tuple[GroupNames, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    layers: Annotated[tuple[LayerRun, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
    extent_runs: Annotated[tuple[ExtentRun, ...], msgspec.Meta(min_length=1, max_length=MAX_RUNS)]

    @classmethod
    def of(cls, cache: GrowableKVCache, groups: Sequence[Sequence[str]] | None = None) -> CacheGeometry:
        """Describe the committed prefix of a cache.

        Args:
            groups: names of the layers of each KV-cache group; by default all layers are one group.

        Raises:
            StateError: nothing is committed.
            ConfigError: the groups do not name each layer once.
        """
        if not cache.num_committed_blocks:
            raise StateError("the KV cache has no committed block that a peer could reach; commit() first.")
        groups = [tuple(group) for group in groups] if groups is not None else [cache.config.layers]
        named = [name for group in groups for name in group]
        if sorted(named) != sorted(cache.config.layers) or not all(groups):
            raise ConfigError("KV-cache groups must name each layer of the cache once, and none may be empty.")
        single = _single_layers(cache)
        layers = [
            msgspec.structs.replace(single[name], group=number) for number, group in enumerate(groups) for name in group
        ]
        extents = sorted(cache.extents(), key=lambda extent: (extent.chunk, extent.address))
        return cls(
            layout=cache.config.layout.name,
            driver=cache.driver.name,
            device_id=cache.driver.device_id,
            base=cache.address,
            num_blocks=cache.num_committed_blocks,
            groups=tuple(GroupNames.of(group) for group in groups),
            layers=tuple(_joined_layers(layers)),
            extent_runs=tuple(_joined_extents((e.address - cache.address, e.nbytes) for e in extents)),
        )

    def encode(self) -> bytes:
        """As bytes for a handshake."""
        return _encoder.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> CacheGeometry:
        """Back from :meth:`encode`, from a peer that may send anything.

        Raises:
            ProtocolError: not a valid geometry.
        """
        geometry = unpack(_decoder, data, "a peer's cache geometry")
        counts = [sum(run.count for run in geometry.runs_of(number)) for number in range(len(geometry.groups))]
        if counts != [group.num_layers for group in geometry.groups] or sum(counts) != geometry.num_layers:
            raise ProtocolError("a peer's cache geometry has groups and layers that do not agree; it is refused.")
        if geometry.num_layers > MAX_LAYERS or sum(run.count for run in geometry.extent_runs) > MAX_RUNS:
            raise ProtocolError(f"a peer's cache geometry has more than {MAX_LAYERS} layers or extents; it is refused.")
        return geometry

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(run.count for run in self.layers)

    def runs_of(self, group: int) -> tuple[LayerRun, ...]:
        """The runs of one group, in order."""
        return tuple(run for run in self.layers if run.group == group)

    def extents(self) -> tuple[ByteRange, ...]:
        """All extents (I5), in address order; no descriptor may cross the border of one (I6)."""
        return tuple(
            sorted(
                ByteRange(run.offset + index * run.stride, run.nbytes)
                for run in self.extent_runs
                for index in range(run.count)
            )
        )

    def block_ranges(self, group: int, block: int) -> tuple[ByteRange, ...]:
        """The bytes of one block of a group: layer by layer, each page in memory order. Padding is left out."""
        return tuple(
            ByteRange(run.offset + layer * run.layer_stride + block * run.block_stride + piece, run.piece_nbytes)
            for run in self.runs_of(group)
            for layer in range(run.count)
            for piece in run.piece_offsets()
        )

    def block_nbytes(self, group: int) -> int:
        """Bytes of one block of a group, all layers, without padding."""
        return sum(run.count * run.page_nbytes for run in self.runs_of(group))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CacheGeometry)


def _single_layers(cache: GrowableKVCache) -> dict[str, LayerRun]:
    """Every layer of a cache as a run of its own."""
    from pdkv.kvcache.placement import tensor_strides

    begins = [segment.offset for segment in cache.segments]
    found = {}
    for tensor in cache.config.tensors:
        spec = cache.config.specs[tensor.layers[0]]
        _, strides = tensor_strides(cache.config, tensor)
        for index, name in enumerate(tensor.layers):
            offset = tensor.offset + index * strides[0]
            found[name] = LayerRun(
                group=0,
                count=1,
                num_heads=spec.num_heads,
                num_states=spec.num_states,
                content_nbytes=spec.content_bytes,
                block_size=spec.block_size,
                dtype=str(spec.dtype or ""),
                segment=bisect_right(begins, offset) - 1,
                segment_step=0,
                offset=offset,
                layer_stride=0,
                block_stride=strides[1],
                head_stride=strides[2],
                state_stride=strides[3],
                interior=spec.interior,
            )
    return found


def _joined_layers(layers: Sequence[LayerRun]) -> Iterator[LayerRun]:
    """Single layers as the fewest runs of constant strides."""
    position = 0
    while position < len(layers):
        first = layers[position]
        count = 1
        steps = (0, 0)
        while position + count < len(layers):
            following, last = layers[position + count], layers[position + count - 1]
            now = (following.offset - last.offset, following.segment - last.segment)
            alike = msgspec.structs.replace(following, offset=first.offset, segment=first.segment) == first
            if not alike or (count > 1 and now != steps):
                break
            steps, count = now, count + 1
        yield msgspec.structs.replace(first, count=count, layer_stride=steps[0], segment_step=steps[1])
        position += count


def _joined_extents(extents: Iterable[tuple[int, int]]) -> Iterator[ExtentRun]:
    """Extents as the fewest runs of constant strides; segments of equal size become one for each chunk."""
    run: ExtentRun | None = None
    for offset, nbytes in extents:
        if run is not None and nbytes == run.nbytes:
            stride = offset - (run.offset + (run.count - 1) * run.stride)
            if run.count == 1 or stride == run.stride:
                run = ExtentRun(run.offset, nbytes, stride, run.count + 1)
                continue
        if run is not None:
            yield run
        run = ExtentRun(offset, nbytes, 0, 1)
    if run is not None:
        yield run
