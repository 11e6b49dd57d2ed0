"""Sizes of recurrent states from config.json, by family.

Shapes and dtypes: `model_executor/layers/mamba/mamba_utils.py` of vLLM 0.33.0 and the model files named below. No
speculative tokens, no ReplaySSM ring.
"""

from __future__ import annotations

from pdkv.planner.fields import Fields
from pdkv.planner.layers import StateLayer, StateTensor


def mamba1(fields: Fields) -> StateLayer:
    """Jamba, Mamba: a convolution of `d_conv - 1` columns and a state of `d_state` per inner channel (`jamba.py`)."""
    inner = fields.get("intermediate_size") if fields.get("model_type") == "mamba" else None
    if inner is None:
        inner = fields.need("mamba_expand", "expand") * fields.need("hidden_size")
    state, kernel = fields.need("mamba_d_state", "state_size"), fields.need("mamba_d_conv", "conv_kernel")
    return StateLayer((StateTensor((inner, kernel - 1), "auto"), StateTensor((inner, state), "auto")))


def mamba2(fields: Fields) -> StateLayer:
    """Nemotron-H, Bamba, Granite 4, Zamba 2, Falcon-H1, Mamba 2 (`nemotron_h.py`, `bamba.py`)."""
    heads = fields.need("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    size = fields.need("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
    groups = fields.need("n_groups", "mamba_n_groups", "mamba_ngroups")
    state = fields.need("ssm_state_size", "mamba_d_state", "state_size")
    kernel = fields.need("conv_kernel", "mamba_d_conv", "conv_kernel_size")
    conv = StateTensor(
        (heads * size + 2 * groups * state, kernel - 1),
        "auto",
        groups=groups,
        elements_per_group=2 * state * (kernel - 1),
    )
    return StateLayer((conv, StateTensor((heads, size, state), _ssm_dtype(fields))))


def gated_delta_net(fields: Fields) -> StateLayer:
    """Qwen3-Next and Qwen3.5 linear attention (`gated_delta_net_state_shape`)."""
    key_heads, value_heads = fields.need("linear_num_key_heads"), fields.need("linear_num_value_heads")
    key_size, value_size = fields.need("linear_key_head_dim"), fields.need("linear_value_head_dim")
    kernel = fields.need("linear_conv_kernel_dim")
    conv = StateTensor((2 * key_heads * key_size + value_heads * value_size, kernel - 1), "auto")
    return StateLayer((conv, StateTensor((value_heads, value_size, key_size), _ssm_dtype(fields))))


def short_convolution(fields: Fields) -> StateLayer:
    """LFM2's gated convolutions: `L_cache - 1` columns of the hidden size."""
    return StateLayer((StateTensor((fields.need("hidden_size"), fields.need("conv_L_cache") - 1), "auto"),))


def _ssm_dtype(fields: Fields) -> str:
    """float32 for Nemotron-H unless its config says otherwise, else the model's (`NemotronHForCausalLMConfig`)."""
    default = "float32" if fields.get("model_type") == "nemotron_h" else "auto"
    return str(fields.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default=default))


__all__ = ["gated_delta_net", "mamba1", "mamba2", "short_convolution"]
