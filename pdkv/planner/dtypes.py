"""Bytes that one token's KV takes in one layer, for every `--kv-cache-dtype` of vLLM 0.33, scales and padding included.

Names: `CacheDType` in vLLM 0.33.0, `vllm/config/cache.py`. Each formula names the file of vLLM 0.33.0 that it is from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdkv.errors import ConfigError

TORCH_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class HeadShape:
    """One KV head: sizes of its key and value vectors, and how much of the key rotary embedding turns (elements)."""

    key_size: int
    value_size: int
    rotary_size: int


def _elements(shape: HeadShape, nbytes: int) -> int:
    return (shape.key_size + shape.value_size) * nbytes


def _per_token_head(shape: HeadShape, bits: int) -> int:
    """Data and one float32 scale for each of K and V (`v1/attention/backends/triton_attn.py`)."""
    return shape.key_size * bits // 8 + shape.value_size * bits // 8 + 2 * 4


def _turboquant(shape: HeadShape, key_bits: int, value_bits: int) -> int:
    """`model_executor/layers/quantization/turboquant/config.py`: K with a float16 norm unless it is fp8, V with float16
    scale and zero point, together rounded up to an even number. Both take the key's head size.
    """
    size = shape.key_size
    key = size if key_bits == 8 else _ceil_div(size * key_bits, 8) + 2
    value = _ceil_div(size * value_bits, 8) + 4
    return _round_up(key + value, 2)


def _ultraquant(shape: HeadShape) -> int:
    """`v1/attention/ops/ultraquant/format.py`: 4-bit codes and one scale byte per 32 elements, for K and V."""
    _require_multiple("ultraquant_4bit", shape.key_size, 32)
    return 2 * (shape.key_size // 2 + shape.key_size // 32)


def _octave(shape: HeadShape, value_bits: int, compact: bool) -> int:
    """`v1/attention/ops/rocm_octave.py`: rotary K dims in 4 bits, the rest in 3 (all in 3 where compact); float16
    scales, one per 64 K dims (one in all where compact) and one for V; rounded up to 8 bytes (4 where compact).
    """
    name, size = "octave", shape.key_size
    _require_multiple(name, size, 64)
    _require_multiple(name, shape.rotary_size, 64)
    wide = 0 if compact else shape.rotary_size
    codes = wide * 4 // 8 + (size - wide) * 3 // 8 + size * value_bits // 8
    scales = (1 if compact else size // 64) + 1
    return _round_up(codes + 2 * scales, 4 if compact else 8)


def _nvfp4(shape: HeadShape) -> int:
    """`utils/torch_utils.py:nvfp4_kv_cache_full_dim`: half a byte an element and one fp8 scale per 16, for K and V."""
    if shape.key_size != shape.value_size:
        raise ConfigError("nvfp4 needs keys and values of one head size; choose another --kv-cache-dtype")
    return 2 * (shape.key_size // 2 + shape.key_size // 16)


_HEAD_BYTES: dict[str, Callable[[HeadShape], int]] = {
    "float16": lambda shape: _elements(shape, 2),
    "bfloat16": lambda shape: _elements(shape, 2),
    "fp8": lambda shape: _elements(shape, 1),
    "fp8_e4m3": lambda shape: _elements(shape, 1),
    "fp8_e5m2": lambda shape: _elements(shape, 1),
    "fp8_inc": lambda shape: _elements(shape, 1),
    "turboquant_k8v4": lambda shape: _turboquant(shape, 8, 4),
    "turboquant_4bit_nc": lambda shape: _turboquant(shape, 4, 4),
    "turboquant_k3v4_nc": lambda shape: _turboquant(shape, 3, 4),
    "turboquant_3bit_nc": lambda shape: _turboquant(shape, 3, 3),
    "octave_k3v4": lambda shape: _octave(shape, 4, compact=False),
    "octave_k3v3": lambda shape: _octave(shape, 3, compact=False),
    "octave_k3v3_compact": lambda shape: _octave(shape, 3, compact=True),
    "ultraquant_4bit": _ultraquant,
    "int4_per_token_head": lambda shape: _per_token_head(shape, 4),
    "int8_per_token_head": lambda shape: _per_token_head(shape, 8),
    "fp8_per_token_head": lambda shape: _per_token_head(shape, 8),
    "nvfp4": _nvfp4,
    "nvfp4_4over6": _nvfp4,
}

# Opaque layouts of DeepSeek's sparse MLA, sized for a latent of 512 and a rotary part of 64
# (`model_executor/layers/attention/mla_attention.py`).
_DS_MLA_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_DS_MLA_SHAPE = (512, 64)

_PLAIN_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}

#: All names that vLLM 0.33 lists, in its order.
KV_CACHE_DTYPES: tuple[str, ...] = (
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "octave_k3v4", "octave_k3v3",
    "octave_k3v3_compact", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head",
    "nvfp4", "nvfp4_4over6",
)  # fmt: skip


def check_dtype(kv_cache_dtype: str) -> str:
    """Return the name if vLLM 0.33 lists it; raise ConfigError with the list otherwise."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(f"KV cache dtype {kv_cache_dtype!r} is unknown; vLLM 0.33 has {', '.join(KV_CACHE_DTYPES)}")
    return kv_cache_dtype


def head_bytes(kv_cache_dtype: str, shape: HeadShape, model_dtype: str) -> int:
    """Bytes of one token's K and V in one KV head.

    Args:
        kv_cache_dtype: one of `KV_CACHE_DTYPES`; "auto" is the model's dtype.
        model_dtype: "bfloat16", "float16" or "float32".

    Raises:
        ConfigError: the dtype is unknown, is for MLA only, or does not take this head size.
    """
    if check_dtype(kv_cache_dtype) == "auto":
        return _elements(shape, torch_dtype_bytes(model_dtype))
    if kv_cache_dtype not in _HEAD_BYTES:
        raise ConfigError(f"KV cache dtype {kv_cache_dtype} is for DeepSeek's sparse MLA; this model has KV heads")
    return _HEAD_BYTES[kv_cache_dtype](shape)


def latent_bytes(kv_cache_dtype: str, kv_lora_rank: int, qk_rope_head_dim: int, model_dtype: str) -> int:
    """Bytes of one token's latent vector in one MLA layer: rank plus rotary part, stored once, not as K and V.

    Raises:
        ConfigError: the dtype is unknown, is not offered for MLA, or is for another latent size.
    """
    elements = kv_lora_rank + qk_rope_head_dim
    if check_dtype(kv_cache_dtype) == "auto":
        return elements * torch_dtype_bytes(model_dtype)
    if kv_cache_dtype in _PLAIN_BYTES:
        return elements * _PLAIN_BYTES[kv_cache_dtype]
    if kv_cache_dtype in _DS_MLA_BYTES:
        if (kv_lora_rank, qk_rope_head_dim) != _DS_MLA_SHAPE:
            raise ConfigError(f"{kv_cache_dtype} is for a latent of 512+64, not {kv_lora_rank}+{qk_rope_head_dim}")
        return _DS_MLA_BYTES[kv_cache_dtype]
    if kv_cache_dtype.endswith("_per_token_head"):
        # A pair of float32 scales behind the latent (`MLACommonBackend.customize_spec`, mla_attention.py).
        return elements // (2 if kv_cache_dtype.startswith("int4") else 1) + 2 * 4
    raise ConfigError(f"KV cache dtype {kv_cache_dtype} has no MLA layout in vLLM 0.33; fp8 or bfloat16 has")


def torch_dtype_bytes(name: str) -> int:
    """Size of an element of the model's dtype ("bfloat16", "float16", "float32") in bytes."""
    if name not in TORCH_DTYPE_BYTES:
        raise ConfigError(f"Model dtype {name!r} is unknown; give one of {', '.join(TORCH_DTYPE_BYTES)}")
    return TORCH_DTYPE_BYTES[name]


def keeps_boundary_layers(kv_cache_dtype: str) -> bool:
    """Whether vLLM keeps the first and last two attention layers of a dense model in the model's dtype (TurboQuant:
    `get_boundary_skip_layers` in `quantization/turboquant/config.py`).
    """
    return kv_cache_dtype.startswith("turboquant_")


def _require_multiple(name: str, size: int, of: int) -> None:
    if size % of:
        raise ConfigError(f"{name} needs head and rotary sizes that are multiples of {of}, not {size}")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(value: int, to: int) -> int:
    return _ceil_div(value, to) * to


__all__ = [
    "KV_CACHE_DTYPES",
    "HeadShape",
    "check_dtype",
    "head_bytes",
    "keeps_boundary_layers",
    "latent_bytes",
    "torch_dtype_bytes",
]
