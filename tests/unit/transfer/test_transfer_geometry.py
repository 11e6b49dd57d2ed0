"""What a cache tells a peer about itself, and the copies that two such descriptions amount to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kvcache_strategies import GRANULE, configs, specs

from pdkv.errors import ConfigError, ExtentError, GeometryError, LayoutError, ProtocolError, StateError
from pdkv.kvcache import (
    AttentionSpec,
    GrowableKVCache,
    KVCacheConfig,
    KVCacheLayout,
    find_extent,
    split_at_extents,
)
from pdkv.memory import open_driver
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import require_pairs
from pdkv.transfer.fit import first_difference, model_difference, paired_runs, require_same_bytes
from pdkv.transfer.geometry import CacheGeometry, ExtentRun
from pdkv.transfer.runs import Copies, _in_order, _split, _unsplit, copies_for

pytestmark = pytest.mark.cpu

HEADS_OUTSIDE = [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.LHBNC, KVCacheLayout.BHLNC]
TOKENS_OUTSIDE = [KVCacheLayout.LBNHC, KVCacheLayout.BLNHC]
SPEC = AttentionSpec(num_kv_heads=2, block_size=4, head_size=16, dtype="float32")
NAMES = ["layer.0", "layer.1", "layer.2"]


@contextmanager
def built(config: KVCacheConfig, *commits: int) -> Iterator[GrowableKVCache]:
    with GrowableKVCache(config, open_driver("host", granule=GRANULE)) as cache:
        for blocks in commits:
            cache.commit(blocks)
        yield cache


@contextmanager
def uniform(layout: KVCacheLayout = KVCacheLayout.LBNHC, *commits: int, **changes: object) -> Iterator[GrowableKVCache]:
    spec = AttentionSpec(**{**SPEC.__dict__, **changes})  # type: ignore[arg-type]
    with built(KVCacheConfig.uniform(NAMES, spec, 64, layout), *(commits or (64,))) as cache:
        yield cache


def raw(cache: GrowableKVCache) -> torch.Tensor:
    return cache.raw_tensor()


def fill_randomly(cache: GrowableKVCache, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for extent in cache.extents():
        begin = extent.address - cache.address
        noise = torch.randint(-128, 128, (extent.nbytes,), dtype=torch.int8, generator=generator)
        raw(cache)[begin : begin + extent.nbytes].copy_(noise)


def carry_out(copies: Copies, source: GrowableKVCache, destination: GrowableKVCache) -> None:
    for begin, to, nbytes in copies:
        raw(destination)[to : to + nbytes].copy_(raw(source)[begin : begin + nbytes])


def block_bytes(cache: GrowableKVCache, layer: str, block: int) -> torch.Tensor:
    return cache.views()[layer][block].contiguous().view(torch.uint8)


@st.composite
def two_alike(draw: st.DrawFn) -> tuple[KVCacheConfig, KVCacheConfig]:
    """The same pages in the same inner order, placed as either layout has it."""
    spec, layers = draw(specs()), [f"layer.{index}" for index in range(draw(st.integers(1, 4)))]
    family = draw(st.sampled_from([HEADS_OUTSIDE, TOKENS_OUTSIDE]))
    try:
        first, second = (
            KVCacheConfig.uniform(layers, spec, draw(st.integers(4, 24)), draw(st.sampled_from(family)))
            for _ in range(2)
        )
    except LayoutError:
        assume(False)
    return first, second


def commits_of(draw: st.DataObject, config: KVCacheConfig) -> list[int]:
    if not config.can_grow:
        return [config.num_blocks]
    return draw.draw(st.lists(st.integers(1, config.num_blocks), min_size=1, max_size=4).map(sorted))


@settings(max_examples=50)
@given(two_alike(), st.data())
def test_copies_bring_exactly_the_named_blocks_whatever_layouts_and_chunks(
    pair: tuple[KVCacheConfig, KVCacheConfig], data: st.DataObject
) -> None:
    with (
        built(pair[0], *commits_of(data, pair[0])) as source,
        built(pair[1], *commits_of(data, pair[1])) as destination,
    ):
        fill_randomly(source, 1)
        fill_randomly(destination, 2)
        wanted = data.draw(st.permutations(range(destination.num_committed_blocks)))
        count = data.draw(st.integers(1, min(len(wanted), 8)))
        sources = data.draw(st.lists(st.integers(0, source.num_committed_blocks - 1), min_size=count, max_size=count))
        pairs = [BlockPair(0, a, b) for a, b in zip(sources, wanted, strict=False)]
        ours, theirs = CacheGeometry.of(destination), CacheGeometry.of(source)
        assert first_difference(ours, theirs) is None
        before = {
            (name, b): block_bytes(destination, name, b).clone()
            for name in destination.config.layers
            for b in range(destination.num_committed_blocks)
        }
        carry_out(copies_for(theirs, ours, pairs), source, destination)
        for block in range(destination.num_committed_blocks):
            origin = next((p.source for p in pairs if p.destination == block), None)
            for name in destination.config.layers:
                expected = before[name, block] if origin is None else block_bytes(source, name, origin)
                assert torch.equal(block_bytes(destination, name, block), expected), (name, block)


@settings(max_examples=50)
@given(configs(max_blocks=24, min_blocks=4), st.data())
def test_block_ranges_are_the_pages_of_the_views_and_lie_in_extents(config: KVCacheConfig, data: st.DataObject) -> None:
    with built(config, *commits_of(data, config)) as cache:
        geometry = CacheGeometry.decode(CacheGeometry.of(cache).encode())
        fill_randomly(cache, 3)
        block = data.draw(st.integers(0, cache.num_committed_blocks - 1))
        ranges = geometry.block_ranges(0, block)
        assert sum(nbytes for _, nbytes in ranges) == geometry.block_nbytes(0)
        extents = cache.extents()
        for offset, nbytes in ranges:
            split_at_extents(extents, cache.address + offset, nbytes)
        got = torch.cat([raw(cache)[offset : offset + nbytes] for offset, nbytes in ranges]).view(torch.uint8)
        order = config.layout.layer_view_order[1:]
        pages = [cache.views()[name][block].permute([axis - 1 for axis in order]) for name in cache.config.layers]
        expected = torch.cat([page.contiguous().view(torch.uint8).flatten() for page in pages])
        assert torch.equal(got, expected)
        assert geometry.extents() == tuple(
            sorted((extent.address - cache.address, extent.nbytes) for extent in cache.extents())
        )


@settings(max_examples=50)
@given(two_alike(), st.data())
def test_I6_copies_are_maximal_and_none_crosses_an_extent_of_either_side(
    pair: tuple[KVCacheConfig, KVCacheConfig], data: st.DataObject
) -> None:
    with built(pair[0], *commits_of(data, pair[0])) as left, built(pair[1], *commits_of(data, pair[1])) as right:
        source, destination = CacheGeometry.of(left), CacheGeometry.of(right)
        count = min(source.num_blocks, destination.num_blocks)
        copies = copies_for(source, destination, [BlockPair(0, b, b) for b in range(count)])
        borders = [{e.offset for e in side.extents()} for side in (source, destination)]
        extents = left.extents(), right.extents()
        for begin, to, nbytes in copies:
            find_extent(extents[0], left.address + begin, nbytes)
            find_extent(extents[1], right.address + to, nbytes)
        for (begin, to, nbytes), (next_begin, next_to, _) in pairwise(copies):
            if begin + nbytes == next_begin and to + nbytes == next_to:
                assert next_begin in borders[0] or next_to in borders[1], "split where nothing asks for it"


def test_neighbours_on_both_sides_are_one_copy_a_layer() -> None:
    with uniform() as source, uniform() as destination:
        geometries = CacheGeometry.of(source), CacheGeometry.of(destination)
        together = copies_for(*geometries, [BlockPair(0, 8 + b, 30 + b) for b in range(20)])
        assert len(together) == len(NAMES)
        assert together.total_nbytes == 20 * geometries[0].block_nbytes(0)
        apart = copies_for(*geometries, [BlockPair(0, 8 + b, 60 - b) for b in range(20)])
        assert len(apart) == 20 * len(NAMES)


def test_in_a_block_outermost_layout_neighbours_are_one_copy_over_all_layers() -> None:
    with uniform(KVCacheLayout.BLHNC) as source, uniform(KVCacheLayout.BLHNC) as destination:
        pairs = [BlockPair(0, b, b + 1) for b in range(10)]
        assert len(copies_for(CacheGeometry.of(source), CacheGeometry.of(destination), pairs)) == 1


def with_a_larger_last_layer(geometry: CacheGeometry) -> CacheGeometry:
    """Half as many blocks, of which the last layer's are twice as large."""
    (run,) = geometry.layers
    last = run.part(run.count - 1, 1)
    larger = msgspec.structs.replace(last, num_heads=2 * run.num_heads, block_stride=2 * run.block_stride)
    return msgspec.structs.replace(
        geometry, num_blocks=geometry.num_blocks // 2, layers=(run.part(0, run.count - 1), larger)
    )


@pytest.mark.parametrize("sizes", [1, 2])
@pytest.mark.parametrize("commits", [(64,), (3, 11, 20, 31, 40, 64)], ids=["one extent", "extents that cut blocks"])
def test_a_few_lone_blocks_are_copied_as_when_all_is_planned_anew(sizes: int, commits: tuple[int, ...]) -> None:
    with (
        uniform(KVCacheLayout.LBNHC, *commits, head_size=40) as left,
        uniform(KVCacheLayout.LBNHC, *commits[-2:], head_size=40) as right,
    ):
        source, destination = CacheGeometry.of(left), CacheGeometry.of(right)
        assert (len(commits) == 1) == (len(source.extents()) == len(NAMES))
        if sizes == 2:
            source, destination = map(with_a_larger_last_layer, (source, destination))
        for blocks in (
            [(31, 0)],
            [(5, 30), (17, 2)],
            [(4, 12), (4, 9), (30, 31), (2, 5)],
            [(b, 31 - b) for b in range(32)],
        ):
            pairs = [BlockPair(0, *block) for block in blocks]
            merged = _unsplit(source, destination, pairs)
            cut = _split(merged, merged.destination, destination)
            anew = _in_order(_split(cut, cut.source, source))
            assert list(copies_for(source, destination, pairs)) == list(anew)


def test_lone_blocks_of_several_groups_are_all_copied() -> None:
    with uniform() as source, uniform() as destination:
        fill_randomly(source, 1)
        groups = [NAMES[:1], NAMES[1:]]
        geometries = (CacheGeometry.of(cache, groups) for cache in (source, destination))
        carry_out(copies_for(*geometries, [BlockPair(0, 3, 40), BlockPair(1, 7, 9)]), source, destination)
        for layer, from_, to in ((NAMES[0], 3, 40), (NAMES[1], 7, 9), (NAMES[2], 7, 9)):
            assert torch.equal(block_bytes(destination, layer, to), block_bytes(source, layer, from_))


@pytest.mark.parametrize("pair", [BlockPair(0, 8, 1), BlockPair(0, 1, 8)])
def test_I5_a_lone_block_that_is_not_committed_is_in_no_extent(pair: BlockPair) -> None:
    with uniform(KVCacheLayout.LBHNC, 8) as cache:
        geometry = CacheGeometry.of(cache)
    for pairs in ([pair], [BlockPair(0, 3, 5), pair]):
        with pytest.raises(ExtentError):
            copies_for(geometry, geometry, pairs)


def test_eighty_uniform_layers_take_fewer_bytes_than_their_addresses() -> None:
    names = [f"model.layers.{index}.self_attn.attn" for index in range(80)]
    with built(KVCacheConfig.uniform(names, SPEC, 64), 10, 40) as cache:
        geometry = CacheGeometry.of(cache)
        assert len(geometry.layers) == 1
        assert len(geometry.extents()) == 160
        assert len(geometry.encode()) < 80 * 8
        assert CacheGeometry.decode(geometry.encode()) == geometry


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "bfloat16", "head_size": 32}, "dtype of KV-cache group 0 is 'bfloat16' on the peer"),
        ({"num_kv_heads": 4}, "num_heads of KV-cache group 0 is 4"),
        ({"block_size": 8}, "num_states of KV-cache group 0 is 8"),
        ({"head_size": 8}, "content_nbytes of KV-cache group 0 is 64"),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, object], named: str) -> None:
    with uniform() as one, uniform(KVCacheLayout.LBNHC, 64, **changes) as other:
        geometries = CacheGeometry.of(one), CacheGeometry.of(other)
    with pytest.raises(GeometryError, match=named):
        require_same_bytes(*geometries)


def test_the_order_inside_of_a_page_must_be_the_same() -> None:
    with uniform(KVCacheLayout.LBNHC) as one, uniform(KVCacheLayout.LBHNC) as other:
        geometries = CacheGeometry.of(one), CacheGeometry.of(other)
    with pytest.raises(GeometryError, match=r"heads_outside .*layouts LBHNC and LBNHC"):
        require_same_bytes(*geometries)


def test_other_layers_are_a_difference_that_nothing_converts() -> None:
    with uniform() as one:
        geometry = CacheGeometry.of(one)
        turned = CacheGeometry.of(one, [["layer.1", "layer.0", "layer.2"]])
        assert "layers of KV-cache group 0 differ" in str(model_difference(geometry, turned))
        two = CacheGeometry.of(one, [["layer.0"], ["layer.1", "layer.2"]])
        assert "2 KV-cache groups" in str(model_difference(geometry, two))


def test_groups_are_pairs_of_runs_of_the_same_layers() -> None:
    with uniform() as cache:
        whole = CacheGeometry.of(cache, [["layer.0", "layer.2", "layer.1"]])
        assert [run.count for run in whole.layers] == [2, 1]
        parted = [(left.count, right.offset) for left, right in paired_runs(whole, whole, 0)]
        assert [count for count, _ in parted] == [2, 1]
        starts = {name: cache.views()[name].data_ptr() - cache.address for name in NAMES}
        assert parted == [(2, starts["layer.0"]), (1, starts["layer.1"])]


def test_groups_name_each_layer_once() -> None:
    with uniform() as cache:
        for groups in ([["layer.0"]], [["layer.0", "layer.0", "layer.1", "layer.2"]], [NAMES, []]):
            with pytest.raises(ConfigError, match="each layer of the cache once"):
                CacheGeometry.of(cache, groups)


def test_a_cache_without_committed_blocks_has_no_geometry() -> None:
    with built(KVCacheConfig.uniform(NAMES, SPEC, 64)) as cache, pytest.raises(StateError, match="commit"):
        CacheGeometry.of(cache)


def test_I14_a_geometry_that_contradicts_itself_is_refused() -> None:
    with uniform() as cache:
        good = CacheGeometry.of(cache)
    for changed in (
        msgspec.structs.replace(good, layers=good.layers * 2),
        msgspec.structs.replace(good, groups=good.groups * 2),
        msgspec.structs.replace(good, layers=(msgspec.structs.replace(good.layers[0], count=2),)),
        msgspec.structs.replace(good, layers=(msgspec.structs.replace(good.layers[0], group=5),)),
        msgspec.structs.replace(good, extent_runs=(ExtentRun(0, 1, 1, 60_000),) * 2),
    ):
        with pytest.raises(ProtocolError):
            CacheGeometry.decode(changed.encode())


@given(st.binary(max_size=200))
def test_I14_any_bytes_are_a_geometry_or_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        CacheGeometry.decode(data)


def test_a_peer_whose_extents_do_not_hold_its_blocks_is_found_out() -> None:
    with uniform() as cache:
        good = CacheGeometry.of(cache)
        short = msgspec.structs.replace(good, extent_runs=(msgspec.structs.replace(good.extent_runs[0], count=2),))
        for source, destination in ((short, good), (good, short)):
            with pytest.raises(ExtentError):
                copies_for(source, destination, [BlockPair(0, 1, 1)])


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([], "no block"),
        ([BlockPair(1, 1, 1)], "group 1"),
        ([BlockPair(-1, 1, 1)], "group -1"),
        ([BlockPair(0, 8, 1)], "block 8 was named as a source"),
        ([BlockPair(0, 1, -1)], "block -1 was named as a destination"),
        ([BlockPair(0, 1, 64)], "block 64 was named as a destination"),
        ([BlockPair(0, 1, 5), BlockPair(0, 2, 5)], "occur twice"),
    ],
)
def test_pairs_that_name_what_is_not_there_are_refused(pairs: list[BlockPair], why: str) -> None:
    with uniform(KVCacheLayout.LBNHC, 8) as source, uniform() as destination, pytest.raises(ProtocolError, match=why):
        require_pairs(pairs, CacheGeometry.of(source), CacheGeometry.of(destination))
