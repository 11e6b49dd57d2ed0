"""What the planner reads from config.json, and what it says when it cannot."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.planner.groups import bytes_per_request, bytes_per_token
from pdkv.planner.layers import AttentionLayer, Layer, ModelShape, PageFormat, StateLayer
from pdkv.planner.model_config import load_config, read_model
from pdkv.planner.presets import find_model, model_names

pytestmark = pytest.mark.cpu

FORM = PageFormat()
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}


def preset(name: str) -> ModelShape:
    return read_model(find_model(name).config, name)


def layers(model: ModelShape) -> list[Layer]:
    return [layer for block in model.layers for layer in block]


def windows(model: ModelShape) -> list[int | None]:
    return [layer.window for layer in layers(model) if isinstance(layer, AttentionLayer)]


class TestWorkedValues:
    """Computed from the published configurations."""

    def test_llama_70b_takes_327680_bytes_a_token_and_305_gib_a_million(self) -> None:
        model = preset("llama-3.1-70b")
        assert bytes_per_token(model, FORM) == 2 * 8 * 128 * 2 * 80 == 327_680
        assert round(bytes_per_request(model, FORM, 1_000_000) / 2**30, 1) == 305.2

    def test_deepseek_v3_takes_70272_bytes_a_token_and_65_gib_a_million(self) -> None:
        model = preset("deepseek-v3")
        assert bytes_per_token(model, FORM) == (512 + 64) * 2 * 61 == 70_272
        assert round(bytes_per_request(model, FORM, 1_000_000) / 2**30, 1) == 65.4

    @pytest.mark.parametrize("name", ["llama-3.1-70b", "deepseek-v3"])
    def test_plain_fp8_halves_both(self, name: str) -> None:
        fp8 = PageFormat(kv_cache_dtype="fp8")
        assert 2 * bytes_per_token(preset(name), fp8) == bytes_per_token(preset(name), FORM)

    def test_llama_2_7b_has_as_many_kv_heads_as_query_heads(self) -> None:
        assert bytes_per_token(preset("llama-2-7b"), FORM) == 2 * 4096 * 2 * 32 == 524_288

    def test_smollm2_in_float32_takes_46080_bytes_a_token(self) -> None:
        config = {**find_model("smollm2-135m").config, "torch_dtype": "float32"}
        assert bytes_per_token(read_model(config), FORM) == 30 * 3 * 128 * 4 == 46_080


class TestWindows:
    def test_mistral_slides_in_every_layer(self) -> None:
        assert windows(preset("mistral-7b-v0.1")) == [4096] * 32

    def test_gemma_2_slides_in_every_second_layer_from_the_first(self) -> None:
        assert windows(preset("gemma-2-9b"))[:4] == [4096, None, 4096, None]

    def test_gemma_3_slides_in_five_of_six_layers(self) -> None:
        assert windows(preset("gemma-3-27b"))[:7] == [1024] * 5 + [None, 1024]

    def test_gpt_oss_slides_as_its_list_says(self) -> None:
        assert windows(preset("gpt-oss-120b"))[:2] == [128, None]

    def test_qwens_window_is_off_unless_it_says_otherwise(self) -> None:
        assert windows(preset("qwen2.5-72b")) == [None] * 80
        on = {**LLAMA, "model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}
        assert windows(read_model(on)) == [None, None, None, 64]
        assert windows(read_model({**LLAMA, "model_type": "qwen2", "sliding_window": 64})) == [None] * 4

    def test_llama_4_attends_within_chunks_except_in_every_fourth_layer(self) -> None:
        config = {"text_config": {**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 8192}}
        found = [layer.chunk for layer in layers(read_model(config)) if isinstance(layer, AttentionLayer)]
        assert found == [8192, 8192, 8192, None]

    def test_a_window_bounds_what_a_request_takes(self) -> None:
        model = preset("mistral-7b-v0.1")
        assert bytes_per_request(model, FORM, 100_000) == 4096 * bytes_per_token(model, FORM)


class TestStates:
    def test_jamba_attends_in_every_eighth_layer_and_keeps_mamba_states_elsewhere(self) -> None:
        model = preset("jamba-v0.1")
        kinds = [type(block[0]).__name__ for block in model.layers]
        assert Counter(kinds) == {"StateLayer": 28, "AttentionLayer": 4}
        assert [i for i, kind in enumerate(kinds) if kind == "AttentionLayer"] == [4, 12, 20, 28]
        # Inner width 8192; three columns of convolution and a state of 16 per channel, in bf16.
        assert model.layers[0][0].stored_bytes(FORM, "bfloat16") == 8192 * (3 + 16) * 2

    def test_nemotron_h_keeps_its_ssm_state_in_float32(self) -> None:
        model = preset("nemotron-h-8b")
        state = next(layer for layer in layers(model) if isinstance(layer, StateLayer))
        conv = (128 * 64 + 2 * 8 * 128) * 3 * 2
        assert state.stored_bytes(FORM, "bfloat16") == conv + 128 * 64 * 128 * 4
        assert Counter(len(block) for block in model.layers) == {1: 28, 0: 24}

    def test_a_state_does_not_grow_with_the_context(self) -> None:
        model = preset("jamba-v0.1")
        growth = bytes_per_request(model, FORM, 2000) - bytes_per_request(model, FORM, 1000)
        assert growth == 1000 * bytes_per_token(model, FORM) == 1000 * 4 * 8 * 256 * 2

    def test_states_split_over_ranks_and_missing_groups_are_replicated(self) -> None:
        state = next(layer for layer in layers(preset("nemotron-h-8b")) if isinstance(layer, StateLayer))
        eight = state.page(PageFormat(tensor_parallel=8), "bfloat16").nbytes
        assert eight * 8 == state.stored_bytes(FORM, "bfloat16")
        sixteen = state.page(PageFormat(tensor_parallel=16), "bfloat16").nbytes
        assert sixteen * 16 == state.stored_bytes(FORM, "bfloat16") + 8 * 2 * 128 * 3 * 2

    def test_qwen3_next_keeps_a_delta_net_state(self) -> None:
        config = {
            **LLAMA,
            "model_type": "qwen3_next",
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        }
        state = layers(read_model(config))[0]
        assert state.stored_bytes(FORM, "bfloat16") == ((2 * 16 + 32) * 128 * 3 + 32 * 128 * 128) * 2


class TestOtherForms:
    def test_whisper_keeps_the_encoders_states_once_per_request(self) -> None:
        model = preset("whisper-large-v3")
        token = 2 * 20 * 64 * 2 * 32
        assert bytes_per_token(model, FORM) == token
        assert bytes_per_request(model, FORM, 448) == token * (448 + 1500)

    def test_sparse_mla_adds_the_indexers_keys(self) -> None:
        config = {**find_model("deepseek-v3").config, "model_type": "deepseek_v32", "index_head_dim": 128}
        assert bytes_per_token(read_model(config), FORM) == 61 * (1152 + 132)

    def test_multi_query_models_have_one_kv_head(self) -> None:
        config = {**LLAMA, "model_type": "falcon", "multi_query": True, "num_key_value_heads": None}
        assert bytes_per_token(read_model(config), FORM) == 4 * 2 * 64 * 2

    def test_turboquant_leaves_the_outer_layers_of_a_dense_model_alone(self) -> None:
        form = PageFormat(kv_cache_dtype="turboquant_4bit_nc")
        model = preset("llama-3.1-8b")
        assert bytes_per_token(model, form) == 8 * (4 * 512 + 28 * 134)

    @pytest.mark.parametrize("name", model_names())
    def test_every_preset_can_be_read_and_says_where_it_is_from(self, name: str) -> None:
        source = find_model(name)
        assert bytes_per_token(read_model(source.config, name), FORM) > 0
        assert "huggingface.co" in source.source
        assert source.weights_bytes


class TestErrors:
    def test_an_unknown_architecture_gives_all_missing_fields_at_once(self) -> None:
        with pytest.raises(ConfigError) as caught:
            read_model({"model_type": "novel"}, "my-model")
        message = str(caught.value)
        for field in ("my-model (novel)", "num_hidden_layers", "num_attention_heads", "hidden_size"):
            assert field in message

    def test_a_mamba_model_without_its_state_fields_names_them(self) -> None:
        config: dict[str, Any] = {**LLAMA, "layer_types": ["mamba", "attention"] * 2}
        with pytest.raises(ConfigError, match=r"mamba_num_heads or mamba_n_heads.*ssm_state_size"):
            read_model(config)

    def test_a_layer_list_of_the_wrong_length_is_named(self) -> None:
        with pytest.raises(ConfigError, match="one entry for each of 4 layers"):
            read_model({**LLAMA, "layer_types": ["full_attention"]})

    def test_a_layer_of_unknown_kind_is_named(self) -> None:
        with pytest.raises(ConfigError, match="retention"):
            read_model({**LLAMA, "layer_types": ["retention"] * 4})

    def test_attention_without_known_sizes_is_refused_not_guessed(self) -> None:
        with pytest.raises(ConfigError, match="DeepSeek-V4"):
            read_model({**LLAMA, "compress_ratios": [4, 128]})

    def test_heads_that_do_not_divide_over_ranks_are_refused(self) -> None:
        model = read_model({**LLAMA, "num_key_value_heads": 6, "num_attention_heads": 12, "head_dim": 64})
        with pytest.raises(ConfigError, match="neither divide"):
            model.layers[0][0].page(PageFormat(tensor_parallel=4), "bfloat16")

    def test_a_file_that_is_no_configuration_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("[1]")
        with pytest.raises(ConfigError, match="no JSON object"):
            load_config(tmp_path)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ConfigError, match="not JSON"):
            load_config(tmp_path)
        with pytest.raises(ConfigError, match="Cannot read"):
            load_config(tmp_path / "nowhere.json")


def test_a_models_folder_gives_its_weights_too(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    source = find_model(str(folder))
    assert (source.name, source.weights_bytes) == ("tiny", 1000)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 5000}}))
    assert find_model(str(folder / "config.json")).weights_bytes == 5000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9), ("num_hidden_layers", 10**30), ("head_dim", "64"), ("head_dim", [64]),
        ("num_key_value_heads", "x"), ("rope_scaling", [1]), ("attn_layer_indices", 5),
        ("max_position_embeddings", "long"), ("partial_rotary_factor", float("nan")), ("v_head_dim", {}),
    ],
)  # fmt: skip
def test_a_field_of_a_wrong_type_or_size_is_one_sentence(field: str, value: object) -> None:
    with pytest.raises(ConfigError):
        read_model({**LLAMA, field: value})


def test_a_configuration_nested_too_deeply_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not JSON"):
        load_config(tmp_path)
