"""Placements: where every byte lies, by brute force; padding, segments, committed prefixes, budgets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcache_strategies import GRANULE, GROWABLE, WHOLE_ONLY, configs, overlaid, uniform_configs

from pdkv.errors import CapacityError, ConfigError, LayoutError
from pdkv.kvcache import AttentionSpec, KVCacheConfig, KVCacheLayout, KVCacheTensor, PageSpec
from pdkv.kvcache.views import layer_views

pytestmark = pytest.mark.cpu

PAGE = PageSpec(num_heads=2, num_states=3, content_bytes=10, block_size=3)
GRANULES = st.sampled_from([1, 64, 4096, 12288])


def page_addresses(config: KVCacheConfig, tensor: KVCacheTensor, layer: int, block: int) -> torch.Tensor:
    """Byte numbers ``[H, N, C]`` of a page: its begin by vLLM's sentence, its inside by the letters of the layout."""
    spec = config.specs[tensor.layers[layer]]
    begin = tensor.offset + layer * tensor.layer_stride + block * tensor.block_stride
    sizes = {"H": spec.num_heads, "N": spec.num_states, "C": spec.content_bytes}
    inside = [letter for letter in config.layout.name if letter in sizes]
    count = torch.arange(spec.dense_page_bytes).view([sizes[letter] for letter in inside])
    return begin + count.permute([inside.index(letter) for letter in "HNC"])


def all_pages(config: KVCacheConfig) -> list[tuple[str, int, torch.Tensor]]:
    return [
        (name, block, page_addresses(config, tensor, layer, block))
        for tensor in config.tensors
        for layer, name in enumerate(tensor.layers)
        for block in range(config.num_blocks)
    ]


@given(configs(max_blocks=5), GRANULES)
def test_views_show_exactly_the_bytes_that_the_placement_says(config: KVCacheConfig, granule: int) -> None:
    padded = config.padded(granule)
    # Three planes of number, since a byte cannot hold its own address.
    planes = [(torch.arange(padded.size) >> shift & 0xFF).to(torch.uint8).view(torch.int8) for shift in (0, 8, 16)]
    for tensor in padded.tensors:
        views = [layer_views(plane, padded, tensor) for plane in planes]
        for layer, name in enumerate(tensor.layers):
            for block in range(padded.num_blocks):
                seen = [view[name][block].contiguous().view(torch.uint8).long() for view in views]
                expected = page_addresses(padded, tensor, layer, block)
                assert torch.equal(seen[0] + (seen[1] << 8) + (seen[2] << 16), expected & 0xFFFFFF)


@given(uniform_configs(max_blocks=5))
def test_uniform_pages_do_not_overlap_and_lie_within_the_storage(config: KVCacheConfig) -> None:
    taken = torch.cat([page.flatten() for _, _, page in all_pages(config)])
    assert taken.unique().numel() == taken.numel()
    assert int(taken.max()) < config.size


@given(uniform_configs())
def test_uniform_caches_are_dense(config: KVCacheConfig) -> None:
    spec = next(iter(config.specs.values()))
    assert config.size == len(config.layers) * config.num_blocks * spec.page_bytes


@given(st.integers(2, 4), st.integers(2, 6), st.integers(1, 40), st.sampled_from(KVCacheLayout))
def test_a_layer_is_one_run_of_memory_only_in_layer_compact_layouts(
    heads: int, block_size: int, head_size: int, layout: KVCacheLayout
) -> None:
    spec = AttentionSpec(heads, block_size, head_size, "float32")
    config = KVCacheConfig.uniform(("a", "b"), spec, 3, layout)
    tensor = config.tensors[0]
    raw = torch.zeros(config.size, dtype=torch.int8)
    view = layer_views(raw, config, tensor)["b"]
    span = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) + 1
    assert (span == view.numel()) == layout.is_layer_compact


@given(configs(), GRANULES)
def test_segments_hold_every_block_in_its_own_stride(config: KVCacheConfig, granule: int) -> None:
    padded = config.padded(granule)
    for name, block, page in all_pages(padded):
        low, high = int(page.min()), int(page.max())
        homes = [
            segment
            for segment in padded.segments
            if segment.offset + block * segment.block_stride <= low
            and high < segment.offset + (block + 1) * segment.block_stride
        ]
        assert len(homes) == 1, (name, block)


@given(configs(), GRANULES)
def test_padded_segments_begin_on_granules_and_share_none(config: KVCacheConfig, granule: int) -> None:
    padded = config.padded(granule)
    assert padded.size % granule == 0
    end = 0
    for segment in padded.segments:
        assert segment.offset % granule == 0
        assert segment.offset >= end
        end = segment.offset + -(-segment.nbytes // granule) * granule
    assert end == padded.size


@given(configs(), GRANULES)
def test_padding_moves_segments_and_nothing_within_them(config: KVCacheConfig, granule: int) -> None:
    padded = config.padded(granule)
    assert [(one.nbytes, one.block_stride) for one in padded.segments] == [
        (one.nbytes, one.block_stride) for one in config.segments
    ]
    assert [tensor.block_stride for tensor in padded.tensors] == [tensor.block_stride for tensor in config.tensors]
    assert padded.padded(granule) == padded


@pytest.mark.parametrize("layout", GROWABLE)
def test_layer_outermost_layouts_have_a_segment_per_layer_and_block_outermost_ones_one(layout: KVCacheLayout) -> None:
    config = KVCacheConfig.uniform(("a", "b", "c"), PAGE, 5, layout)
    assert len(config.segments) == (3 if layout.is_layer_compact else 1)


def test_a_single_block_is_still_one_segment_in_block_outermost_layouts() -> None:
    assert len(KVCacheConfig.uniform(("a", "b", "c"), PAGE, 1, KVCacheLayout.BLHNC).segments) == 1


def test_the_layer_stride_is_padded_to_the_granule() -> None:
    config = KVCacheConfig.uniform(("a", "b"), PAGE, 100)
    tensor = config.padded(GRANULE).tensors[0]
    assert (config.tensors[0].layer_stride, tensor.layer_stride, tensor.size) == (6000, 8192, 16384)


def test_overlaid_groups_share_segments() -> None:
    config = overlaid(KVCacheLayout.LBNHC, 10, PAGE, (3, 2)).padded(GRANULE)
    assert len(config.segments) == 3
    assert [tensor.layer_stride for tensor in config.tensors] == [GRANULE, GRANULE]


@pytest.mark.parametrize("order", [1, -1])
def test_a_smaller_page_may_overlay_the_beginning_of_a_larger_one(order: int) -> None:
    small = PageSpec(1, 1, 20, 3)
    tensors = (KVCacheTensor(600, ("a",), 600, 60), KVCacheTensor(600, ("b",), 600, 20))[::order]
    (segment,) = KVCacheConfig(10, tensors, {"a": PAGE, "b": small}, KVCacheLayout.LBNHC).segments
    assert (segment.block_stride, segment.nbytes) == (60, 600)


def test_an_overlay_whose_first_blocks_are_not_the_first_bytes_is_refused() -> None:
    small = PageSpec(1, 1, 20, 3)
    tensors = (KVCacheTensor(600, ("a",), 600, 60), KVCacheTensor(600, ("b",), 200, 20, offset=200))
    config = KVCacheConfig(10, tensors, {"a": PAGE, "b": small}, KVCacheLayout.LBNHC)
    with pytest.raises(LayoutError, match=r"'b' begins 200 bytes into .* BLHNC"):
        config.padded(GRANULE)


def test_layers_that_padding_would_put_at_unequal_distances_are_refused() -> None:
    small = PageSpec(1, 1, 20, 3)
    tensors = (KVCacheTensor(1620, ("a", "c", "e"), 800, 60), KVCacheTensor(1620, ("b",), 800, 20, offset=600))
    specs_by_layer = {"a": PAGE, "c": PAGE, "e": PAGE, "b": small}
    config = KVCacheConfig(
        10, (replace(tensors[0], size=2200), replace(tensors[1], size=2200)), specs_by_layer, KVCacheLayout.LBNHC
    )
    with pytest.raises(LayoutError, match="no constant stride apart"):
        config.padded(512)


@given(configs(), st.data())
def test_committed_placements_describe_the_same_bytes_as_the_whole(config: KVCacheConfig, data: st.DataObject) -> None:
    padded = config.padded(GRANULE)
    blocks = data.draw(st.integers(1, padded.num_blocks))
    committed = padded.committed(blocks)
    whole = {(name, block): page for name, block, page in all_pages(padded)}
    for placement in padded.committed_placements(blocks):
        segment = padded.segments[placement.segment]
        assert placement.tensor.size == blocks * segment.block_stride
        for layer, name in enumerate(placement.tensor.layers):
            for block in range(blocks):
                page = page_addresses(committed, placement.tensor, layer, block)
                assert torch.equal(page + segment.offset, whole[name, block])
                assert int(page.max()) < placement.tensor.size
    assert (committed.num_blocks, committed.layers) == (blocks, padded.layers)


def test_committed_placements_are_one_tensor_per_segment_in_layer_outermost_layouts() -> None:
    committed = KVCacheConfig.uniform(("a", "b"), PAGE, 100).padded(GRANULE).committed(7)
    assert committed.tensors == (KVCacheTensor(420, ("a",), 420, 60), KVCacheTensor(420, ("b",), 420, 60))
    assert not committed.one_storage


def test_committed_placements_only_shrink_in_block_outermost_layouts() -> None:
    whole = KVCacheConfig.uniform(("a", "b"), PAGE, 100, KVCacheLayout.BLNHC).padded(GRANULE)
    assert whole.committed(7).tensors == (replace(whole.tensors[0], size=7 * 120),)
    assert whole.committed(7).one_storage


def test_placements_in_several_storages_have_no_segments_of_their_own() -> None:
    committed = KVCacheConfig.uniform(("a", "b"), PAGE, 100).padded(GRANULE).committed(7)
    for use in (lambda: committed.size, lambda: committed.segments, lambda: committed.padded(GRANULE)):
        with pytest.raises(ConfigError, match="one storage per segment"):
            use()


@given(configs(max_blocks=40), GRANULES, st.data())
def test_budget_and_blocks_are_exact_inverses(config: KVCacheConfig, granule: int, data: st.DataObject) -> None:
    padded = config.padded(granule)
    costs = [padded.physical_bytes_for(count, granule) for count in range(padded.num_blocks + 1)]
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert costs[-1] == padded.size
    budget = data.draw(st.integers(-5, padded.size + 5) | st.sampled_from(costs))
    fitting = [count for count, cost in enumerate(costs) if cost <= budget]
    assert padded.blocks_within(budget, granule) == (fitting[-1] if fitting else 0)


@pytest.mark.parametrize("layout", WHOLE_ONLY)
def test_a_layout_that_cannot_grow_costs_all_or_nothing(layout: KVCacheLayout) -> None:
    config = KVCacheConfig.uniform(("a", "b"), PAGE, 100, layout).padded(GRANULE)
    assert [config.physical_bytes_for(count, GRANULE) for count in (0, 1, 99, 100)] == [0, 12288, 12288, 12288]
    assert [config.blocks_within(nbytes, GRANULE) for nbytes in (0, 12287, 12288)] == [0, 0, 100]
    with pytest.raises(LayoutError, match=f"{layout.name}.*LBHNC, LBNHC, BLHNC, BLNHC"):
        config.committed(50)
    assert config.committed(100).tensors == config.tensors


def test_a_budget_below_one_block_per_segment_is_an_error_that_says_what_would_do() -> None:
    config = KVCacheConfig.uniform(("a", "b"), PAGE, 100).padded(GRANULE)
    assert config.require_blocks_within(8192, GRANULE) == 68
    with pytest.raises(CapacityError, match=r"budget of 8191 bytes holds 0 blocks .* 1 are needed, which take 8192"):
        config.require_blocks_within(8191, GRANULE)
    with pytest.raises(CapacityError, match="101 blocks are needed, but the KV cache has a capacity of 100"):
        config.require_blocks_within(1 << 30, GRANULE, minimum=101)


def tensor(**changes: object) -> KVCacheTensor:
    fields = {"size": 600, "layers": ("a",), "layer_stride": 600, "block_stride": 60, "offset": 0}
    return KVCacheTensor(**{**fields, **changes})  # type: ignore[arg-type]


FLOATS = AttentionSpec(1, 1, 7, "float32")


@pytest.mark.parametrize(
    ("build", "error", "complaint"),
    [
        (lambda: KVCacheConfig.uniform(("a",), PAGE, 0), CapacityError, "at least one block, not 0"),
        (lambda: KVCacheConfig(0, (tensor(),), {"a": PAGE}, KVCacheLayout.LBNHC), CapacityError, "not 0"),
        (lambda: KVCacheConfig.uniform((), PAGE, 1), ConfigError, "at least one layer"),
        (lambda: KVCacheConfig(1, (), {}, KVCacheLayout.LBNHC), ConfigError, "at least one layer"),
        (lambda: KVCacheConfig.uniform(("a", "a"), PAGE, 1), ConfigError, "'a'.* placed twice"),
        (lambda: KVCacheConfig(10, (tensor(),), {}, KVCacheLayout.LBNHC), ConfigError, "different layers: .'a'"),
        (
            lambda: KVCacheConfig(
                10, (tensor(layers=("a", "b"), size=1200),), {"a": PAGE, "b": FLOATS}, KVCacheLayout.LBNHC
            ),
            ConfigError,
            "'a' and 'b' share a placement but have different specs",
        ),
        (lambda: KVCacheConfig(11, (tensor(),), {"a": PAGE}, KVCacheLayout.LBNHC), ConfigError, "ends at byte 660"),
        (lambda: KVCacheConfig(9, (tensor(offset=61),), {"a": PAGE}, KVCacheLayout.LBNHC), ConfigError, "at byte 601"),
        (lambda: KVCacheConfig(9, (tensor(block_stride=59),), {"a": PAGE}, KVCacheLayout.LBNHC), ConfigError, "page"),
        (
            lambda: KVCacheConfig(9, (tensor(block_stride=62),), {"a": FLOATS}, KVCacheLayout.LBNHC),
            ConfigError,
            "block_stride of 'a' is 62 bytes, which is no multiple of the 4 bytes",
        ),
        (
            lambda: KVCacheConfig(
                1, (tensor(), tensor(layers=("b",), size=700)), {"a": PAGE, "b": PAGE}, KVCacheLayout.LBNHC
            ),
            ConfigError,
            "agree on its size",
        ),
        (lambda: tensor(layers=()), ConfigError, "at least one layer"),
        (lambda: tensor(block_stride=0), ConfigError, "positive size and strides"),
        (lambda: tensor(offset=-1), ConfigError, "offset of at least 0"),
        (lambda: KVCacheConfig.uniform(("a",), PAGE, 1).padded(0), ConfigError, "positive size"),
    ],
)
def test_placements_that_do_not_fit_together_are_refused(build: object, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        build()  # type: ignore[operator]
