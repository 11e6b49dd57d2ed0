"""Where the pages of some layers lie.

Layer ``layers[l]``'s page for block ``b`` begins at ``offset + l * layer_stride + b * block_stride`` bytes. The fields
are those of vLLM 0.32's ``KVCacheTensor``, so that the same numbers build the same views on either side. Tensors whose
ranges overlap alias the same bytes: cache groups of hybrid models overlay each other, since a block id belongs to one
group at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdkv.errors import ConfigError
from pdkv.kvcache.layout import byte_strides

if TYPE_CHECKING:
    from pdkv.kvcache.config import KVCacheConfig


@dataclass(frozen=True)
class KVCacheTensor:
    """Layers of one shape, a constant stride apart, in a storage of `size` bytes. All fields but `layers` in bytes."""

    size: int
    layers: tuple[str, ...]
    layer_stride: int
    block_stride: int
    offset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ConfigError("a KVCacheTensor needs at least one layer; leave it out where it has none.")
        if min(self.size, self.layer_stride, self.block_stride) <= 0 or self.offset < 0:
            raise ConfigError(
                f"the placement of {self.layers[0]!r} needs positive size and strides and an offset of at least 0, not "
                f"size={self.size}, layer_stride={self.layer_stride}, block_stride={self.block_stride}, "
                f"offset={self.offset}."
            )


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous range that holds all blocks: block ``b`` of whatever lies here is within
    ``[offset + b * block_stride, offset + (b + 1) * block_stride)``.

    Attributes:
        offset: first byte, relative to the storage.
        nbytes: ``num_blocks * block_stride``.
        block_stride: bytes from block to block; the largest, where aliasing tensors have several.
    """

    offset: int
    nbytes: int
    block_stride: int


@dataclass(frozen=True)
class Placement:
    """One tensor of the committed placements, and the index of the segment whose storage it describes."""

    segment: int
    tensor: KVCacheTensor


def check_config(config: KVCacheConfig) -> None:
    """Raise ConfigError where placements, specs and capacity of `config` do not fit together."""
    _check_layers(config)
    for tensor in config.tensors:
        _check_tensor(config, tensor)


def tensor_strides(config: KVCacheConfig, tensor: KVCacheTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in bytes of `tensor` over the logical axes ``[L, B, H, N, C]``, C in bytes."""
    spec = config.specs[tensor.layers[0]]
    shape = (len(tensor.layers), config.num_blocks, spec.num_heads, spec.num_states, spec.content_bytes)
    strides = byte_strides(config.layout, shape, layer_stride=tensor.layer_stride, block_stride=tensor.block_stride)
    return shape, strides


def _check_layers(config: KVCacheConfig) -> None:
    names = config.layers
    if not names:
        raise ConfigError("a KV cache needs at least one layer.")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"layers {twice} are placed twice; give each layer one placement.")
    if set(names) != set(config.specs):
        raise ConfigError(
            f"placements and specs name different layers: {sorted(set(names) ^ set(config.specs))}; give each both."
        )
    sizes = {tensor.size for tensor in config.tensors}
    if config.one_storage and len(sizes) > 1:
        raise ConfigError(f"placements in one storage must agree on its size, but say {sorted(sizes)} bytes.")


def _check_tensor(config: KVCacheConfig, tensor: KVCacheTensor) -> None:
    spec = config.specs[tensor.layers[0]]
    for name in tensor.layers:
        if config.specs[name] != spec:
            raise ConfigError(
                f"layers {tensor.layers[0]!r} and {name!r} share a placement but have different specs; "
                f"give them placements of their own."
            )
    for what in ("offset", "layer_stride", "block_stride"):
        if getattr(tensor, what) % spec.item_bytes:
            raise ConfigError(
                f"{what} of {tensor.layers[0]!r} is {getattr(tensor, what)} bytes, which is no multiple of the "
                f"{spec.item_bytes} bytes of a {spec.dtype} element."
            )
    if config.can_grow and tensor.block_stride < spec.page_bytes:
        raise ConfigError(
            f"block_stride of {tensor.layers[0]!r} is {tensor.block_stride} bytes, but a page takes {spec.page_bytes}."
        )
    shape, strides = tensor_strides(config, tensor)
    end = tensor.offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1
    if end > tensor.size:
        raise ConfigError(
            f"the placement of {tensor.layers[0]!r} ends at byte {end} of a storage of {tensor.size} bytes; make "
            f"the storage larger, or correct num_blocks ({config.num_blocks}) and the strides."
        )
