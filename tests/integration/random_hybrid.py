"""A hybrid with random weights, made on the spot: layers with a recurrent state between such with attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: vLLM's NIXL connectors take recurrent states in this layout only.
VARIABLES = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
#: vLLM 0.32 on a CPU raises an IndexError in the second prompt of a hybrid whose prefixes it caches.
OPTIONS: dict[str, Any] = {"enable_prefix_caching": False}


def make_random_hybrid(folder: Path) -> Path:
    """Write a model folder that vLLM loads with `skip_tokenizer_init=True`, and return it."""
    import torch
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    torch.manual_seed(3)
    config = GraniteMoeHybridConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        shared_intermediate_size=512,
        num_local_experts=0,
        num_experts_per_tok=0,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_expand=2,
        mamba_chunk_size=256,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = GraniteMoeHybridForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "embed_tokens" in name else 0.08)
    model.save_pretrained(folder)
    return folder
