"""From a model's config.json to :class:`pdkv.planner.layers.ModelShape`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError
from pdkv.planner.dtypes import HeadShape
from pdkv.planner.fields import Fields
from pdkv.planner.layers import (
    AttentionLayer,
    CrossAttentionLayer,
    IndexerLayer,
    LatentLayer,
    Layer,
    ModelShape,
    StateLayer,
)
from pdkv.planner.states import gated_delta_net, mamba1, mamba2, short_convolution

# Fields of attention forms that this planner has no sizes for. Without this list such a model would pass as plain
# attention and be planned for wrongly.
_NOT_UNDERSTOOD = {
    "compress_ratios": "compressed sparse attention (DeepSeek-V4)",
    "linear_attn_config": "Kimi delta attention",
    "attn_type_list": "lightning attention (MiniMax)",
    "block_configs": "a different shape in each layer",
    "num_kv_shared_layers": "layers that share one KV cache (Gemma 3n)",
    "rwkv_head_size": "RWKV states",
}

_MOST_LAYERS = 100_000


def load_config(path: str | Path) -> dict[str, Any]:
    """Read a config.json, given as the file or as the folder of a model.

    Raises:
        ConfigError: it is not there or not a JSON object.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read the model's configuration {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return config


def read_model(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """Read the shape of a model's KV cache from its configuration.

    Raises:
        ConfigError: fields are missing (all are named) or of a wrong type, or the model has a form of attention without
            known sizes.
    """
    try:
        return _read_model(config, name)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:  # of optional fields, which nobody checks
        raise ConfigError(f"The configuration of {name} has a field of a wrong type or size: {error}") from error


def _read_model(config: Mapping[str, Any], name: str) -> ModelShape:
    fields = Fields(config, name)
    unknown = [text for key, text in _NOT_UNDERSTOOD.items() if fields.get(key)]
    if unknown:
        raise ConfigError(f"{name} uses {' and '.join(unknown)}, for which the planner has no sizes")
    layers = _encoder_decoder(fields) if _has_encoder(config) else _decoder(fields)
    dtype = str(fields.get("torch_dtype", "dtype", default="bfloat16")).removeprefix("torch.")
    names = ("max_position_embeddings", "max_target_positions", "n_positions", "max_sequence_length")
    max_context = fields.need(*names) if fields.get(*names) is not None else None
    fields.check()
    return ModelShape(name, layers, dtype, max_context)


def _decoder(fields: Fields) -> tuple[tuple[Layer, ...], ...]:
    count = fields.need("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count > _MOST_LAYERS:
        raise ConfigError(f"{fields.name} has {count} layers; at most {_MOST_LAYERS} are planned for")
    kinds = _layer_kinds(fields, count)
    makers: dict[str, Callable[[], tuple[Layer, ...]]] = {
        "full": lambda: _full(fields),
        "sliding": lambda: (_attention(fields, window=fields.need("sliding_window")),),
        "chunked": lambda: (_attention(fields, chunk=fields.need("attention_chunk_size")),),
        "mamba": lambda: (_mamba(fields),),
        "linear": lambda: (gated_delta_net(fields),),
        "conv": lambda: (short_convolution(fields),),
        "parallel": lambda: (_attention(fields), _mamba(fields)),
        "none": tuple,
    }
    # One object per kind: the layers of a kind are alike.
    made = {kind: makers[kind]() for kind in dict.fromkeys(kinds)}
    return tuple(made[kind] for kind in kinds)


def _full(fields: Fields) -> tuple[Layer, ...]:
    """Full attention: MLA where the configuration has a latent rank, with an indexer where it is sparse."""
    if fields.get("kv_lora_rank") is None:
        return (_attention(fields),)
    latent = LatentLayer(fields.need("kv_lora_rank"), fields.need("qk_rope_head_dim"))
    if fields.get("index_head_dim") is None:
        return (latent,)
    return latent, IndexerLayer(fields.need("index_head_dim"))


def _attention(fields: Fields, window: int | None = None, chunk: int | None = None) -> AttentionLayer:
    heads = fields.need("num_attention_heads", "n_head", "n_heads", "num_heads")
    names = ("head_dim", "attention_head_dim", "hidden_size_per_head")
    if fields.get(*names):
        size = fields.need(*names)
    else:
        size = max(1, fields.need("hidden_size", "n_embd", "d_model") // heads)
    of_its_own = fields.get("kv_lora_rank") is None and fields.get("v_head_dim") is not None
    value_size = fields.need("v_head_dim") if of_its_own else size
    parameters = fields.get("rope_parameters", "rope_scaling", default={}) or {}
    factor = fields.get("partial_rotary_factor", default=parameters.get("partial_rotary_factor", 1.0))
    return AttentionLayer(_kv_heads(fields, heads), HeadShape(size, value_size, int(size * factor)), window, chunk)


def _kv_heads(fields: Fields, heads: int) -> int:
    """KV heads under the names that vLLM knows (`CONFIG_FIELD_ALIASES`); as many as query heads where none is given."""
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    names = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
    return int(fields.get(*names, default=heads))


def _mamba(fields: Fields) -> StateLayer:
    """Mamba 1 where the state is per inner channel, Mamba 2 where the configuration counts heads."""
    if fields.get("model_type") in ("jamba", "mamba", "falcon_mamba"):
        return mamba1(fields)
    return mamba2(fields)


def _has_encoder(config: Mapping[str, Any]) -> bool:
    return bool(config.get("is_encoder_decoder"))


def _encoder_decoder(fields: Fields) -> tuple[tuple[Layer, ...], ...]:
    """Whisper and its like: each decoder layer caches its own tokens and the encoder's states."""
    count, heads = fields.need("decoder_layers"), fields.need("decoder_attention_heads")
    size = fields.need("d_model") // heads
    head = HeadShape(size, size, 0)
    cross = CrossAttentionLayer(heads, head, fields.need("max_source_positions"))
    return ((AttentionLayer(heads, head), cross),) * count


_KIND_NAMES = {
    "full_attention": "full", "attention": "full", "full": "full", "global": "full", "*": "full",
    "sliding_attention": "sliding", "sliding_window": "sliding", "local": "sliding",
    "chunked_attention": "chunked",
    "mamba": "mamba", "mamba2": "mamba", "m": "mamba", "M": "mamba",
    "linear_attention": "linear", "conv": "conv", "hybrid": "parallel",
    "mlp": "none", "moe": "none", "-": "none", "E": "none",
}  # fmt: skip


def _layer_kinds(fields: Fields, count: int) -> list[str]:
    """The kind of each layer: a list in the configuration, or the family's rule."""
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if fields.get(name) is not None:
            kinds = [str(kind) for kind in fields.need_list(name, count)]
            unknown = sorted(set(kinds) - set(_KIND_NAMES) - {"None"})
            if unknown:
                raise ConfigError(f"{fields.name} has layers of unknown kind: {', '.join(unknown)}")
            return [_KIND_NAMES.get(kind, "none") for kind in kinds]
    if fields.get("attn_layer_period") is not None:  # Jamba
        period, offset = fields.need("attn_layer_period"), int(fields.get("attn_layer_offset", default=0))
        return ["full" if i % period == offset else "mamba" for i in range(count)]
    if fields.get("attn_layer_indices") is not None:  # Bamba
        attention = set(fields.get("attn_layer_indices"))
        return ["full" if i in attention else "mamba" for i in range(count)]
    if fields.get("model_type") == "falcon_h1":
        return ["parallel"] * count
    if fields.get("model_type") in ("mamba", "mamba2", "falcon_mamba"):
        return ["mamba"] * count
    return _window_kinds(fields, count)


def _window_kinds(fields: Fields, count: int) -> list[str]:
    """Which layers slide, where the configuration has a window but no list."""
    kind = fields.get("model_type")
    if fields.get("attention_chunk_size") is not None and kind == "llama4_text":
        rope = fields.get("no_rope_layers", default=[(i + 1) % 4 for i in range(count)]) or []
        return ["chunked" if i < len(rope) and rope[i] else "full" for i in range(count)]
    # Qwen's configurations carry a window that is off unless they say otherwise.
    slides = fields.get("use_sliding_window", default=not str(kind).startswith("qwen"))
    if not fields.get("sliding_window") or not slides:
        return ["full"] * count
    if kind in ("gemma2", "gpt_oss"):  # every second layer is full, the first slides
        return ["full" if i % 2 else "sliding" for i in range(count)]
    pattern = fields.get("sliding_window_pattern", default=6 if kind in ("gemma3_text", "gemma3") else None)
    if isinstance(pattern, int) and pattern > 1:  # Gemma 3, Cohere 2: the last of each `pattern` layers is full
        return ["sliding" if (i + 1) % pattern else "full" for i in range(count)]
    first = fields.get("max_window_layers") if fields.get("use_sliding_window") else None
    return ["sliding" if first is None or i >= first else "full" for i in range(count)]


__all__ = ["load_config", "read_model"]
