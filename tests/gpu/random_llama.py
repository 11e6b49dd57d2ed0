"""A Llama with random weights, made on the spot: small enough to start fast, wide enough that attention matters."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 8192


def make_random_llama(folder: Path, seed: int = 7) -> Path:
    """Write a model folder that vLLM loads with `skip_tokenizer_init=True`, and return it.

    Weights are drawn from N(0, 0.04) and embeddings from N(0, 1): with the tiny weights of a fresh initialisation the
    next token would hardly depend on the KV cache, and a test of the cache would pass with a broken one.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "embed_tokens" in name else 0.04)
    model.save_pretrained(folder)
    return folder
