"""The six layouts, their strides by an independent computation, and the one place where a layout is chosen."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcache_strategies import GROWABLE, WHOLE_ONLY

from pdkv.errors import LayoutError
from pdkv.kvcache import KVCacheLayout, parse_layout, resolve_layout
from pdkv.kvcache.layout import byte_strides

pytestmark = pytest.mark.cpu

AXES = "LBHNC"


def brute_force_addresses(layout: KVCacheLayout, shape: tuple[int, ...]) -> torch.Tensor:
    """Byte number of every element ``[l, b, h, n, c]`` when memory is filled in the order that the name spells."""
    physical = [shape[AXES.index(letter)] for letter in layout.name]
    count = torch.arange(torch.Size(physical).numel()).view(physical)
    return count.permute([layout.name.index(letter) for letter in AXES])


@pytest.mark.parametrize("layout", KVCacheLayout)
@given(shape=st.tuples(*[st.integers(1, 4)] * 5))
def test_strides_address_every_element_where_the_name_puts_it(
    layout: KVCacheLayout, shape: tuple[int, int, int, int, int]
) -> None:
    strides = byte_strides(layout, shape)
    addressed = torch.arange(torch.Size(shape).numel()).as_strided(shape, strides)
    assert torch.equal(addressed, brute_force_addresses(layout, shape))


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_the_value_is_the_permutation_that_the_name_spells(layout: KVCacheLayout) -> None:
    assert layout.stride_order == tuple(AXES.index(letter) for letter in layout.name)
    assert layout.layer_view_order == tuple("BHNC".index(letter) for letter in layout.name if letter != "L")


@pytest.mark.parametrize(
    ("predicate", "layouts"),
    [
        ("is_layer_compact", {"LBHNC", "LBNHC", "LHBNC"}),
        ("is_block_contiguous", {"LBHNC", "BLHNC"}),
        ("is_block_compact", {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}),
        ("is_block_outermost", {"BLHNC", "BLNHC", "BHLNC"}),
    ],
)
def test_predicates_hold_for_exactly_the_layouts_of_the_design(predicate: str, layouts: set[str]) -> None:
    assert {layout.name for layout in KVCacheLayout if getattr(layout, predicate)} == layouts


@pytest.mark.parametrize("layout", GROWABLE)
def test_page_padding_goes_between_pages_and_not_into_them(layout: KVCacheLayout) -> None:
    shape = (2, 3, 2, 4, 8)
    dense, padded = byte_strides(layout, shape), byte_strides(layout, shape, page_bytes=100)
    assert padded[2:] == dense[2:]
    assert min(padded[:2]) == 100
    assert max(padded[:2]) == 100 * (3 if layout.is_layer_compact else 2)


@pytest.mark.parametrize("layout", WHOLE_ONLY)
def test_page_padding_is_refused_where_a_page_is_scattered(layout: KVCacheLayout) -> None:
    with pytest.raises(LayoutError, match="LBNHC"):
        byte_strides(layout, (2, 3, 2, 4, 8), page_bytes=100)


def test_nothing_asked_for_gives_lbnhc() -> None:
    assert resolve_layout(environ={}) is KVCacheLayout.LBNHC


def test_each_source_yields_to_the_ones_before_it() -> None:
    wishes = {"override": "LBHNC", "backend": ["BLHNC", "LBHNC", "BLNHC"], "connector": "BLNHC"}
    environ = {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}
    assert resolve_layout(**wishes, environ=environ) is KVCacheLayout.LBHNC
    del wishes["override"]
    assert resolve_layout(**wishes, environ=environ) is KVCacheLayout.BLHNC
    assert resolve_layout(**wishes, environ={}) is KVCacheLayout.BLNHC
    del wishes["connector"]
    assert resolve_layout(**wishes, environ={}) is KVCacheLayout.BLHNC


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "blhnc")
    assert resolve_layout() is KVCacheLayout.BLHNC


@pytest.mark.parametrize("source", ["variable", "connector"])
def test_a_preference_that_cannot_be_met_is_dropped_with_a_warning(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"VLLM_KV_CACHE_LAYOUT": "BLHNC"} if source == "variable" else {}
    with caplog.at_level(logging.WARNING):
        layout = resolve_layout(backend="LBHNC", connector="BLHNC" if source == "connector" else None, environ=environ)
    assert layout is KVCacheLayout.LBHNC
    assert "BLHNC" in caplog.text
    assert "LBHNC" in caplog.text


@pytest.mark.parametrize("layout", WHOLE_ONLY)
def test_a_preference_that_cannot_grow_is_dropped_unless_growing_is_not_asked_for(
    layout: KVCacheLayout, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve_layout(connector=layout, environ={}) is KVCacheLayout.LBNHC
    assert layout.name in caplog.text
    assert resolve_layout(connector=layout, environ={}, growable=False) is layout


@pytest.mark.parametrize("wishes", [{"override": "LHBNC"}, {"backend": "BHLNC"}, {"backend": []}])
def test_a_requirement_that_cannot_be_met_is_an_error_that_names_layouts_which_work(wishes: dict[str, str]) -> None:
    with pytest.raises(LayoutError, match="LBNHC"):
        resolve_layout(**wishes, environ={})


def test_an_override_that_the_backend_does_not_accept_is_an_error() -> None:
    with pytest.raises(LayoutError, match="LBHNC"):
        resolve_layout(override="BLHNC", backend="LBHNC", environ={})


def test_older_names_are_understood() -> None:
    assert parse_layout("NHD") is KVCacheLayout.LBNHC
    assert parse_layout("hnd") is KVCacheLayout.LBHNC


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(LayoutError, match=r"'DENSE'.*LBHNC, LBNHC"):
        resolve_layout(environ={"VLLM_KV_CACHE_LAYOUT": "DENSE"})
