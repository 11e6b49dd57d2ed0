"""The seam "interior of pages": how an attention backend arranges a head's bytes in a block, which vLLM does not say.

Blocks of one size become blocks of another only where that is known. What is not known here is "opaque": such an engine
exchanges KV with one that is exactly like it, and nobody converts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdkv.kvcache import Interior
from pdkv_connectors.vllm.placement import layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

_BACKENDS = "vllm.v1.attention.backends."
#: Modules of backends whose pages hold K and V of a token, or its latent vector, side by side.
_BY_TOKEN = frozenset(
    _BACKENDS + name
    for name in (
        "flash_attn",
        "flash_attn_diffkv",
        "flex_attention",
        "triton_attn",
        "triton_attn_diffkv",
        "mla.cpu_mla",
        "mla.cutlass_mla",
        "mla.flashattn_mla",
        "mla.flashmla",
        "mla.triton_mla",
    )
)
#: Instruction sets, as vLLM's CPU backend calls them, whose kernels keep K by column and V by token. Found by writing
#: numbers with its `cpu_attn_reshape_and_cache` and looking where they are; of fp8 that has not been done.
_BY_COLUMN = ("vec", "vec16")
_BY_COLUMN_DTYPES = ("float32", "bfloat16", "float16")


def interior_of(vllm_config: VllmConfig, config: KVCacheConfig) -> Interior:
    """How the pages of all layers hold what they hold; "opaque" where layers differ or it is not known."""
    layers = vllm_config.compilation_config.static_forward_context
    found = {_of_layer(layers[name], spec, config) for name, spec in layer_specs(config).items() if name in layers}
    return found.pop() if len(found) == 1 else "opaque"


def _of_layer(layer: object, spec: AttentionSpec, config: KVCacheConfig) -> Interior:
    if not hasattr(layer, "get_attn_backend"):
        return "opaque"
    backend = layer.get_attn_backend()
    if backend.__module__ == _BACKENDS + "cpu_attn":
        return _of_cpu(spec)
    if backend.__module__ not in _BY_TOKEN:
        return "opaque"
    states_outside = (config.kv_cache_layout or "LBNHC").endswith("NHC")
    # A kernel may take a block as several of its own, and then they, not the heads, are outermost.
    return "tokens" if states_outside or spec.num_heads == 1 or _is_kernel_block(backend, spec) else "opaque"


def _of_cpu(spec: AttentionSpec) -> Interior:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size)
    by_column = isa in _BY_COLUMN and str(spec.dtype).removeprefix("torch.") in _BY_COLUMN_DTYPES
    return "columns" if by_column else "heads"


def _is_kernel_block(backend: type, spec: AttentionSpec) -> bool:
    sizes = getattr(backend, "get_supported_kernel_block_sizes", list)()
    return any(spec.block_size == size if isinstance(size, int) else spec.block_size % size.base == 0 for size in sizes)
