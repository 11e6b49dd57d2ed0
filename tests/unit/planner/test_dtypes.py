"""Bytes of a token under every KV cache dtype."""

from __future__ import annotations

import pytest

from pdkv.errors import ConfigError
from pdkv.planner.dtypes import KV_CACHE_DTYPES, HeadShape, head_bytes, latent_bytes

pytestmark = pytest.mark.cpu

HEAD = HeadShape(128, 128, 128)

# Worked by hand from the layouts that the module names; head size 128.
PER_HEAD = {
    "auto": 512,
    "float16": 512,
    "bfloat16": 512,
    "fp8": 256,
    "fp8_e4m3": 256,
    "fp8_e5m2": 256,
    "fp8_inc": 256,
    "turboquant_k8v4": 128 + 64 + 4,
    "turboquant_4bit_nc": (64 + 2) + (64 + 4),
    "turboquant_k3v4_nc": (48 + 2) + (64 + 4),
    "turboquant_3bit_nc": (48 + 2) + (48 + 4),
    "octave_k3v4": 64 + 64 + 8,  # 134 rounded up to 8
    "octave_k3v3": 64 + 48 + 8,  # 118 rounded up to 8
    "octave_k3v3_compact": 48 + 48 + 4,
    "ultraquant_4bit": 2 * (64 + 4),
    "int4_per_token_head": 64 + 64 + 8,
    "int8_per_token_head": 128 + 128 + 8,
    "fp8_per_token_head": 128 + 128 + 8,
    "nvfp4": 2 * (64 + 8),
    "nvfp4_4over6": 2 * (64 + 8),
}
PER_LATENT = {
    "auto": 1152,
    "float16": 1152,
    "bfloat16": 1152,
    "fp8": 576,
    "fp8_e4m3": 576,
    "fp8_e5m2": 576,
    "fp8_inc": 576,
    "fp8_ds_mla": 656,
    "nvfp4_ds_mla": 352,
    "int4_per_token_head": 288 + 8,
    "int8_per_token_head": 576 + 8,
    "fp8_per_token_head": 576 + 8,
}


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_each_dtype_has_its_size_per_head_or_says_that_it_is_for_mla(dtype: str) -> None:
    if dtype in PER_HEAD:
        assert head_bytes(dtype, HEAD, "bfloat16") == PER_HEAD[dtype]
    else:
        with pytest.raises(ConfigError, match="sparse MLA"):
            head_bytes(dtype, HEAD, "bfloat16")


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_each_dtype_has_its_size_per_latent_or_says_that_mla_has_no_such_layout(dtype: str) -> None:
    if dtype in PER_LATENT:
        assert latent_bytes(dtype, 512, 64, "bfloat16") == PER_LATENT[dtype]
    else:
        with pytest.raises(ConfigError, match="no MLA layout"):
            latent_bytes(dtype, 512, 64, "bfloat16")


def test_auto_follows_the_models_dtype() -> None:
    assert head_bytes("auto", HEAD, "float32") == 2 * head_bytes("auto", HEAD, "float16")


def test_values_of_another_size_than_keys_count_with_their_own() -> None:
    assert head_bytes("bfloat16", HeadShape(192, 128, 64), "bfloat16") == 2 * (192 + 128)
    with pytest.raises(ConfigError, match="one head size"):
        head_bytes("nvfp4", HeadShape(192, 128, 64), "bfloat16")


def test_octave_takes_fewer_bits_where_less_of_the_key_is_rotary() -> None:
    assert head_bytes("octave_k3v4", HeadShape(128, 128, 64), "bfloat16") == 128
    with pytest.raises(ConfigError, match="multiples of 64"):
        head_bytes("octave_k3v4", HeadShape(80, 80, 80), "bfloat16")


@pytest.mark.parametrize(("dtype", "model_dtype"), [("fp7", "bfloat16"), ("auto", "int3")])
def test_an_unknown_dtype_is_an_error_that_lists_the_known(dtype: str, model_dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown.*float16"):
        head_bytes(dtype, HEAD, model_dtype)


def test_the_sparse_mla_layout_is_refused_for_another_latent() -> None:
    with pytest.raises(ConfigError, match=r"512\+64"):
        latent_bytes("fp8_ds_mla", 256, 32, "bfloat16")
