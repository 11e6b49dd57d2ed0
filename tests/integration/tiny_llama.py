"""A tiny Llama with random weights: starts fast, in any number of ranks, and can be made a hybrid."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512


def make_tiny_llama(folder: Path, *, hybrid: bool = False, seed: int = 3) -> Path:
    """Write a model folder that vLLM loads with `skip_tokenizer_init=True`, and return it.

    Weights are wide enough that the next token depends on the KV cache: with those of a fresh initialisation a test of
    the cache would pass with a broken one.

    Args:
        hybrid: have the layers alternate between a sliding window and full attention.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "embed_tokens" in name else 0.08)
    model.save_pretrained(folder)
    if hybrid:
        # Not known to transformers' Llama; vLLM's reads them.
        config.layer_types = ["sliding_attention", "full_attention"] * 2
        config.sliding_window = 64
        config.save_pretrained(folder)
    return folder
