"""Pages by their specs."""

from __future__ import annotations

import pytest
import torch

from pdkv.errors import ConfigError
from pdkv.kvcache import AttentionSpec, MLASpec, PageSpec, SlidingWindowSpec, require_block_multiple

pytestmark = pytest.mark.cpu


def test_attention_keeps_k_and_v_of_a_token_side_by_side() -> None:
    spec = AttentionSpec(num_kv_heads=8, block_size=16, head_size=128, dtype="bfloat16")
    assert (spec.num_heads, spec.num_states, spec.content_bytes) == (8, 16, 2 * 128 * 2)
    assert spec.page_bytes == 8 * 16 * 256 * 2


def test_attention_may_have_fewer_elements_of_v() -> None:
    assert AttentionSpec(2, 4, 192, "float16", head_size_v=128).content_bytes == (192 + 128) * 2


def test_latent_attention_keeps_one_vector_without_v() -> None:
    spec = MLASpec(block_size=64, head_size=576, dtype="bfloat16")
    assert (spec.num_heads, spec.num_states, spec.content_bytes) == (1, 64, 576 * 2)


def test_latent_attention_may_compress_tokens() -> None:
    assert MLASpec(64, 512, "uint8", tokens_per_state=4).page_bytes == 16 * 512


def test_a_sliding_window_changes_no_page() -> None:
    window = SlidingWindowSpec(2, 16, 64, "float32", sliding_window=1024)
    assert window.page_bytes == AttentionSpec(2, 16, 64, "float32").page_bytes
    assert window.sliding_window == 1024


def test_a_bare_page_counts_bytes() -> None:
    spec = PageSpec(num_heads=2, num_states=3, content_bytes=5, block_size=3)
    assert (spec.page_bytes, spec.item_bytes, spec.dtype) == (30, 1, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtypes_are_known_by_name_or_by_torchs_object(dtype: str | torch.dtype) -> None:
    assert AttentionSpec(1, 1, 1, dtype) == AttentionSpec(1, 1, 1, "bfloat16")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8", "float16"])
def test_element_sizes_are_torchs(name: str) -> None:
    assert AttentionSpec(1, 1, 1, name).item_bytes == getattr(torch, name).itemsize


def test_padding_adds_room_and_leaves_the_content() -> None:
    spec = AttentionSpec(1, 2, 8, "float32", page_bytes_padded=256)
    assert (spec.page_bytes, spec.dense_page_bytes) == (256, 128)


_ATTENTION = {"num_kv_heads": 8, "block_size": 16, "head_size": 128, "head_size_v": 64, "page_bytes_padded": 1 << 20}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 16.0, 0.5, "16", 1j])
@pytest.mark.parametrize("what", _ATTENTION)
def test_a_number_that_is_not_whole_is_refused_by_its_name(what: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^AttentionSpec needs a whole number as {what}, not .*\.$"):
        AttentionSpec(dtype="float32", **{**_ATTENTION, what: value})  # type: ignore[arg-type]


def test_a_number_of_another_library_is_kept_as_pythons_own() -> None:
    spec = AttentionSpec(torch.tensor(8), 16, 128, "float32")  # type: ignore[arg-type]
    assert type(spec.num_kv_heads) is int
    assert spec == AttentionSpec(8, 16, 128, "float32")


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: AttentionSpec(0, 16, 64, "float32"), "positive num_heads, not 0"),
        (lambda: AttentionSpec(1, 0, 64, "float32"), "positive block_size, not 0"),
        (lambda: AttentionSpec(1, 16, 0, "float32"), "positive head_size"),
        (lambda: AttentionSpec(1, 16, 64, "int3"), "'int3'; use one of"),
        (lambda: AttentionSpec(1, 16, 64, "float32", page_bytes_padded=8191), "page takes 8192"),
        (lambda: AttentionSpec(1, 16, 64, "float32", page_bytes_padded=8194), "whole elements"),
        (lambda: PageSpec(1, 1, 6, 1, "float32"), "no whole number of float32 elements"),
        (lambda: AttentionSpec(None, 16, 64, "float32"), "a whole number as num_kv_heads, not None"),
        (lambda: PageSpec(1, 1, float("nan"), 1), "PageSpec needs a whole number as content_bytes, not nan"),
        (lambda: MLASpec(64, 64, "float32", tokens_per_state=2.0), "a whole number as tokens_per_state, not 2.0"),
        (
            lambda: SlidingWindowSpec(1, 16, 64, "float32", sliding_window=8.5),
            "number as sliding_window, not 8.5",
        ),
        (lambda: SlidingWindowSpec(1, 16, 64, "float32", sliding_window=0), "positive sliding_window, not 0"),
        (lambda: MLASpec(10, 64, "float32", tokens_per_state=4), "use 8 or 12 tokens"),
        (lambda: require_block_multiple(20, 16), "block of 20 tokens .* 16; use 16 or 32 tokens"),
        (lambda: require_block_multiple(0, 16), "use 16 tokens"),
    ],
)
def test_what_can_be_no_page_is_refused_in_one_sentence(build: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build()  # type: ignore[operator]
