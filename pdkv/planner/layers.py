"""The layers of a model as far as its KV cache is concerned, and what a page of each takes on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

from pdkv.errors import ConfigError
from pdkv.planner.dtypes import HeadShape, head_bytes, latent_bytes, torch_dtype_bytes

Kind = Literal["full", "sliding", "chunked", "cross", "state"]


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What, besides the model, decides how large a page is."""

    tensor_parallel: int = 1
    block_size: int = 16
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Page:
    """One block of one layer on one rank.

    Attributes:
        kind: how many blocks a request needs of it; see :meth:`blocks_for`.
        nbytes: bytes of the page.
        block_size: tokens in a page; 0 for a state, whose page does not depend on tokens.
        extent: window, chunk or encoder length in tokens; 0 for the other kinds.
        padded: whether the page may be padded to a larger one. MLA pages may not: sparse MLA reads whole token rows.
    """

    kind: Kind
    nbytes: int
    block_size: int
    extent: int = 0
    padded: bool = True

    @property
    def token_bytes(self) -> float:
        """Bytes per token held; 0 for a state."""
        return self.nbytes / self.block_size if self.block_size else 0.0


class Layer(Protocol):
    """A layer with something in the KV cache."""

    def page(self, page_format: PageFormat, model_dtype: str) -> Page: ...

    def stored_bytes(self, page_format: PageFormat, model_dtype: str) -> int:
        """Over all ranks and without replicas: bytes of one token, or of one request for a state."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Keys and values per head. `window` bounds a sliding layer, `chunk` one that attends within chunks (tokens)."""

    num_kv_heads: int
    head: HeadShape
    window: int | None = None
    chunk: int | None = None

    def page(self, page_format: PageFormat, model_dtype: str) -> Page:
        heads = heads_per_rank(self.num_kv_heads, page_format.tensor_parallel)
        nbytes = heads * head_bytes(page_format.kv_cache_dtype, self.head, model_dtype) * page_format.block_size
        kind: Kind = "sliding" if self.window else "chunked" if self.chunk else "full"
        return Page(kind, nbytes, page_format.block_size, self.window or self.chunk or 0)

    def stored_bytes(self, page_format: PageFormat, model_dtype: str) -> int:
        return self.num_kv_heads * head_bytes(page_format.kv_cache_dtype, self.head, model_dtype)


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """MLA: one latent vector of `kv_lora_rank + qk_rope_head_dim` per token, whole on every tensor parallel rank."""

    kv_lora_rank: int
    qk_rope_head_dim: int

    def page(self, page_format: PageFormat, model_dtype: str) -> Page:
        token = self.stored_bytes(page_format, model_dtype)
        return Page("full", token * page_format.block_size, page_format.block_size, padded=False)

    def stored_bytes(self, page_format: PageFormat, model_dtype: str) -> int:
        return latent_bytes(page_format.kv_cache_dtype, self.kv_lora_rank, self.qk_rope_head_dim, model_dtype)


@dataclass(frozen=True, slots=True)
class IndexerLayer:
    """The keys by which sparse MLA picks tokens: fp8 with a float32 scale per 128 (vLLM 0.33, `deepseek_v2.py`)."""

    index_head_dim: int

    def page(self, page_format: PageFormat, model_dtype: str) -> Page:
        nbytes = self.stored_bytes(page_format, model_dtype) * page_format.block_size
        return Page("full", nbytes, page_format.block_size, padded=False)

    def stored_bytes(self, page_format: PageFormat, model_dtype: str) -> int:
        return self.index_head_dim + self.index_head_dim // 128 * 4


@dataclass(frozen=True, slots=True)
class CrossAttentionLayer:
    """Keys and values of the encoder's states: `encoder_tokens` per request, however long the output is."""

    num_kv_heads: int
    head: HeadShape
    encoder_tokens: int

    def page(self, page_format: PageFormat, model_dtype: str) -> Page:
        heads = heads_per_rank(self.num_kv_heads, page_format.tensor_parallel)
        nbytes = heads * head_bytes(page_format.kv_cache_dtype, self.head, model_dtype) * page_format.block_size
        return Page("cross", nbytes, page_format.block_size, self.encoder_tokens)

    def stored_bytes(self, page_format: PageFormat, model_dtype: str) -> int:
        """Bytes of one request: all encoder tokens."""
        return self.encoder_tokens * self.num_kv_heads * head_bytes(page_format.kv_cache_dtype, self.head, model_dtype)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent state, split over tensor parallelism.

    `dtype` is a torch dtype or "auto" for the model's. Where Mamba 2 has fewer `groups` than there are ranks, each
    missing one is added as a replica of `elements_per_group` (`extra_groups_for_head_shards`, vLLM 0.33).
    """

    shape: tuple[int, ...]
    dtype: str
    groups: int = 0
    elements_per_group: int = 0

    def elements(self, tensor_parallel: int) -> int:
        """Elements on one rank."""
        total = prod(self.shape)
        if self.groups and self.groups % tensor_parallel:
            total += (tensor_parallel - self.groups) * self.elements_per_group
        if total % tensor_parallel:
            raise ConfigError(f"A state of shape {self.shape} does not divide over {tensor_parallel} ranks")
        return total // tensor_parallel


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A recurrent layer (Mamba, gated delta net): a state of fixed size per request, split over tensor parallelism."""

    tensors: tuple[StateTensor, ...]

    def page(self, page_format: PageFormat, model_dtype: str) -> Page:
        return Page("state", self._bytes(page_format.tensor_parallel, model_dtype), 0)

    def stored_bytes(self, page_format: PageFormat, model_dtype: str) -> int:
        """Bytes of one request's state."""
        return self._bytes(1, model_dtype)

    def _bytes(self, tensor_parallel: int, model_dtype: str) -> int:
        return sum(
            tensor.elements(tensor_parallel)
            * torch_dtype_bytes(model_dtype if tensor.dtype == "auto" else tensor.dtype)
            for tensor in self.tensors
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as the planner sees it. `layers` holds, for each transformer layer, what it keeps in the cache."""

    name: str
    layers: tuple[tuple[Layer, ...], ...]
    dtype: str
    max_context: int | None = None

    @property
    def is_latent(self) -> bool:
        return any(isinstance(layer, LatentLayer) for block in self.layers for layer in block)

    @property
    def has_state(self) -> bool:
        return any(isinstance(layer, StateLayer) for block in self.layers for layer in block)

    @property
    def max_kv_heads(self) -> int:
        """Largest number of KV heads that tensor parallelism can split; 1 where nothing can be split."""
        heads = [
            layer.num_kv_heads
            for block in self.layers
            for layer in block
            if isinstance(layer, AttentionLayer | CrossAttentionLayer)
        ]
        return max(heads, default=1)


def heads_per_rank(num_kv_heads: int, tensor_parallel: int) -> int:
    """KV heads on one rank: split, and replicated where there are more ranks than heads.

    Source: `ModelConfig.get_num_kv_heads` of vLLM 0.33, ``max(1, heads // tp)``; its layers demand that one divides the
    other.
    """
    if num_kv_heads % tensor_parallel and tensor_parallel % num_kv_heads:
        raise ConfigError(
            f"{num_kv_heads} KV heads neither divide over tensor parallelism {tensor_parallel} nor does it over them; "
            "choose a multiple or a divisor"
        )
    return max(1, num_kv_heads // tensor_parallel)


__all__ = [
    "AttentionLayer",
    "CrossAttentionLayer",
    "IndexerLayer",
    "LatentLayer",
    "Layer",
    "ModelShape",
    "Page",
    "PageFormat",
    "StateLayer",
    "StateTensor",
    "heads_per_rank",
]
