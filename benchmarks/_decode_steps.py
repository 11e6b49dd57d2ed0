"""Decode steps to measure a transfer beside: what a model does for one token of each request, as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

Step = Callable[[], torch.Tensor]


def products(device: str = "cuda", *, weights: int = 16, width: int = 8192, batch: int = 32) -> Step:
    """Nothing but products with weights of 2 GiB in all: bound by memory throughout, the hardest to run beside."""
    matrices = [torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(weights)]
    state = torch.randn(batch, width, device=device, dtype=torch.bfloat16) * 1e-2

    def step() -> torch.Tensor:
        result = state
        for matrix in matrices:
            result = torch.nn.functional.normalize(result @ matrix, dim=1)
        return result

    return step


def llama_layers(device: str = "cuda", *, layers: int = 4, batch: int = 32, context: int = 2048) -> Step:
    """Layers of the shape of an 8B Llama: norms, products, a write of KV, and attention over `context` tokens each."""
    width, kv_heads, head_size, inner = 4096, 8, 128, 14336
    kv_width = kv_heads * head_size
    functions = torch.nn.functional

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.02

    cache = (batch, kv_heads, context, head_size)
    parts = [
        (new(width, width + 2 * kv_width), new(width, width), new(width, 2 * inner), new(inner, width), new(*cache),
         new(*cache), torch.ones(width, device=device, dtype=torch.bfloat16))
        for _ in range(layers)
    ]  # fmt: skip
    state = new(batch, width)

    def step() -> torch.Tensor:
        hidden = state
        for qkv_weight, out_weight, up_weight, down_weight, keys, values, norm in parts:
            qkv = functions.rms_norm(hidden, (width,), norm) @ qkv_weight
            query, new_keys, new_values = qkv.split((width, kv_width, kv_width), dim=1)
            keys[:, :, -1] = new_keys.view(batch, kv_heads, head_size)
            values[:, :, -1] = new_values.view(batch, kv_heads, head_size)
            # The queries that share a head of KV stand in the place of tokens.
            queries = query.reshape(batch, kv_heads, -1, head_size)
            attended = functions.scaled_dot_product_attention(queries, keys, values)
            hidden = hidden + attended.reshape(batch, width) @ out_weight
            gate, up = (functions.rms_norm(hidden, (width,), norm) @ up_weight).chunk(2, dim=1)
            hidden = hidden + (functions.silu(gate) * up) @ down_weight
        return hidden

    return step


STEPS: dict[str, Callable[[], Step]] = {"8B Llama layers": llama_layers, "products only": products}


class Decoding:
    """One of :data:`STEPS`, captured."""

    def __init__(self, name: str) -> None:
        step = STEPS[name]()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._result = step()
        self._step = step  # which owns the weights

    def step(self) -> None:
        """One step, waited for."""
        self.graph.replay()
        torch.cuda.current_stream().synchronize()
