"""Llamas with random weights, made on the spot: they start fast, and attention matters in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Shapes by name; `std` is that of all weights but the embeddings, which are drawn from N(0, 1).
SHAPES: dict[str, dict[str, Any]] = {
    "wide": {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "std": 0.04,
        "seed": 7,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "std": 0.08,
        "seed": 3,
    },
}


def vocabulary(shape: str) -> int:
    """Token ids that the model of that shape knows."""
    return int(SHAPES[shape]["vocab_size"])


def make_random_llama(folder: Path, shape: str, *, hybrid: bool = False) -> Path:
    """Write a model folder that vLLM loads with `skip_tokenizer_init=True`, and return it.

    With the small weights of a fresh initialisation the next token would hardly depend on the KV cache, and a test of
    the cache would pass with a broken one.

    Args:
        shape: a name in :data:`SHAPES`.
        hybrid: have the layers alternate between a sliding window and full attention.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(SHAPES[shape])
    std, seed = sizes.pop("std"), sizes.pop("seed")
    torch.manual_seed(seed)
    config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "embed_tokens" in name else std)
    model.save_pretrained(folder)
    if hybrid:
        # Not known to transformers' Llama; vLLM's reads them.
        config.layer_types = ["sliding_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2)
        config.sliding_window = 64
        config.save_pretrained(folder)
    return folder
