"""The allocator traffic of a decoder's forward: random weights, the shapes of a real model, no KV cache.

A serving engine's attention reads keys and values from the cache by block tables and allocates none of it, so here a
step attends to the tokens of its own chunk only. What allocates in a real step allocates here in the same order and
size: norms, projections, rotary embedding, attention's output, the gated MLP, the logits, and a sampler that sorts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdkv.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama-like decoder, in elements."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int


#: Source of llama-8b: the config.json of Llama-3.1-8B. tiny is for dry runs.
SHAPES = {
    "llama-8b": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
    "tiny": ModelShape(64, 2, 4, 2, 16, 128, 1000),
}


class RandomDecoder:
    """`shape` with random weights on `device`; bfloat16 on CUDA, float32 elsewhere."""

    def __init__(self, shape: ModelShape, device: str) -> None:
        import torch

        if device == "cuda":  # torch's cap asks for a number
            device = f"cuda:{torch.cuda.current_device()}"
        self.shape, self.device = shape, torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        sizes = {
            "qkv": (qkv, shape.hidden),
            "out": (shape.hidden, shape.heads * shape.head_size),
            "gate_up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
        }
        self.layers = [{name: self._random(*size) for name, size in sizes.items()} for _ in range(shape.layers)]
        self.embedding = self._random(shape.vocabulary, shape.hidden)
        self.head = self._random(shape.vocabulary, shape.hidden)
        self.norm = torch.ones(shape.hidden, dtype=self.dtype, device=self.device)

    def step(self, lengths: Sequence[int]) -> torch.Tensor:
        """One step over sequences with `lengths` tokens each, packed; a sampled token for each, int64 `[sequences]`."""
        import torch
        from torch.nn import functional

        with torch.inference_mode():
            tokens = torch.randint(self.shape.vocabulary, (sum(lengths),), device=self.device)
            x = functional.embedding(tokens, self.embedding)
            for layer in self.layers:
                x = x + self._attention(self._normed(x), layer, lengths)
                x = x + self._mlp(self._normed(x), layer)
            last = torch.tensor(lengths, device=self.device).cumsum(0) - 1
            return self._sample(functional.linear(self._normed(x[last]), self.head))

    def _attention(self, x: torch.Tensor, layer: dict[str, torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
        import torch
        from torch.nn import functional

        shape = self.shape
        widths = [n * shape.head_size for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
        q, k, v = torch.split(functional.linear(x, layer["qkv"]), widths, dim=-1)
        q, k = _rotated(q.view(len(x), -1, shape.head_size)), _rotated(k.view(len(x), -1, shape.head_size))
        v = v.view(len(x), -1, shape.head_size)
        out = []
        for parts in zip(*(torch.split(part, list(lengths)) for part in (q, k, v)), strict=True):
            query, key, value = (part.transpose(0, 1)[None] for part in parts)
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            out.append(attended[0].transpose(0, 1))
        return functional.linear(torch.cat(out).reshape(len(x), -1), layer["out"])

    def _mlp(self, x: torch.Tensor, layer: dict[str, torch.Tensor]) -> torch.Tensor:
        from torch.nn import functional

        gate, up = functional.linear(x, layer["gate_up"]).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, layer["down"])

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn import functional

        return functional.rms_norm(x, (self.shape.hidden,), self.norm)

    @staticmethod
    def _sample(logits: torch.Tensor, top_p: float = 0.9) -> torch.Tensor:
        """Nucleus sampling as engines do it in plain torch: float32, a full sort, a cumulative sum, a mask."""
        import torch

        values, order = logits.float().sort(dim=-1, descending=True)
        probabilities = values.softmax(dim=-1)
        values[probabilities.cumsum(dim=-1) - probabilities > top_p] = -torch.inf
        drawn = values.softmax(dim=-1).multinomial(1)
        return order.gather(-1, drawn)[:, 0]

    def _random(self, *size: int) -> torch.Tensor:
        import torch

        return torch.empty(size, dtype=self.dtype, device=self.device).normal_(std=0.02)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding's traffic, `[tokens, heads, head_size]`: two halves, two products, one concatenation."""
    import torch

    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * 0.5 - second * 0.5, second * 0.5 + first * 0.5), dim=-1)


def shape_named(name: str) -> ModelShape:
    """One of :data:`SHAPES`, or a ConfigError that lists them."""
    if name not in SHAPES:
        raise ConfigError(f"there is no torch workload {name!r}; choose one of: {', '.join(SHAPES)}.")
    return SHAPES[name]


__all__ = ["SHAPES", "ModelShape", "RandomDecoder", "shape_named"]
