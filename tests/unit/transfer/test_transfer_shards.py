"""Every head of a rank comes from one rank that has it, whatever the numbers of ranks on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdkv
from pdkv.kvcache import Interior, KVCacheTensor, PageSpec
from pdkv.transfer.messages import Compatibility
from pdkv.transfer.peers import why_incompatible
from pdkv.transfer.shards import HeadSlice, Part, Shards, parts_of

pytestmark = pytest.mark.cpu


def of(heads: int, ranks: int) -> Shards:
    return Shards(num_layers=2, num_kv_heads=heads, head_nbytes=64, num_ranks=ranks)


def held(shards: Shards, rank: int) -> list[int]:
    """The model's heads on a rank, by the rule of vLLM: in order, and repeated where there are more ranks."""
    each = max(1, shards.num_kv_heads // shards.num_ranks)
    first = rank * shards.num_kv_heads // shards.num_ranks
    return list(range(first, first + each))


evens = st.sampled_from([(h, p, d) for h in (1, 2, 3, 4, 8, 12) for p in range(1, 25) for d in range(1, 25)]).filter(
    lambda sizes: of(*sizes[:2]).are_even and of(sizes[0], sizes[2]).are_even
)


@given(evens)
def test_a_rank_gets_each_of_its_heads_once_from_ranks_that_have_them(sizes: tuple[int, int, int]) -> None:
    heads, there, here = sizes
    source, destination = of(heads, there), of(heads, here)
    for rank in range(here):
        got: dict[int, int] = {}
        for part in parts_of(rank, destination, source):
            theirs = held(source, part.rank)
            taken = part.heads or HeadSlice(len(theirs))
            for place in range(taken.count):
                assert taken.destination + place not in got
                got[taken.destination + place] = theirs[taken.source + place]
        assert [got[place] for place in range(len(got))] == held(destination, rank)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ((2, 1, 2), [[Part(0, HeadSlice(1, 0, 0))], [Part(0, HeadSlice(1, 1, 0))]]),
        ((2, 2, 1), [[Part(0, HeadSlice(1, 0, 0)), Part(1, HeadSlice(1, 0, 1))]]),
        ((4, 2, 2), [[Part(0, None)], [Part(1, None)]]),
        ((2, 2, 4), [[Part(0, None)], [Part(0, None)], [Part(1, None)], [Part(1, None)]]),
        ((2, 4, 2), [[Part(0, None)], [Part(3, None)]]),  # of ranks with the same head each is asked
        ((1, 1, 3), [[Part(0, None)], [Part(0, None)], [Part(0, None)]]),
    ],
)
def test_ranks_read_slices_of_one_rank_or_of_several(sizes: tuple[int, int, int], parts: list[list[Part]]) -> None:
    source, destination = of(*sizes[:2]), of(sizes[0], sizes[2])
    assert [list(parts_of(rank, destination, source)) for rank in range(sizes[2])] == parts


def config(*specs: pdkv.kvcache.Spec) -> pdkv.KVCacheConfig:
    layers = {f"layer.{number}": spec for number, spec in enumerate(specs)}
    nbytes, tensors = 4 * max(spec.page_bytes for spec in specs), []
    for number, (name, spec) in enumerate(layers.items()):
        place = KVCacheTensor(nbytes * len(specs), (name,), nbytes, spec.page_bytes, number * nbytes)
        tensors.append(place)
    return pdkv.KVCacheConfig(4, tuple(tensors), layers, pdkv.KVCacheLayout.LBNHC)


def page(heads: int = 2, content: int = 64, interior: Interior = "tokens") -> PageSpec:
    return PageSpec(heads, 16, content, 16, "float32", interior=interior)


def test_the_shards_of_an_engine_follow_from_the_cache_of_a_rank() -> None:
    assert Shards.of(config(page(), page()), 4, 2) == Shards(2, 4, 64, 2, "tokens")
    assert Shards.of(config(page(1, interior="columns")), 2, 8) == Shards(1, 2, 64, 8, "columns")


@pytest.mark.parametrize(
    ("pages", "heads", "ranks"),
    [
        ((page(), page(content=32)), 2, 1),  # layers that differ
        ((page(),), 4, 1),  # the rank should have all four
        ((page(),), 3, 2),  # uneven
        ((page(interior="opaque"),), 2, 1),
    ],
)
def test_what_cannot_be_dealt_out_has_no_shards(pages: tuple[PageSpec, ...], heads: int, ranks: int) -> None:
    assert Shards.of(config(*pages), heads, ranks) is None


def engine(
    ranks: int = 1, block_size: int = 16, *, converts: bool = True, layout: str = "LBNHC", **changes: object
) -> Compatibility:
    shards = Shards(**{"num_layers": 2, "num_kv_heads": 2, "head_nbytes": 64, "num_ranks": ranks, **changes})  # type: ignore[arg-type]
    return Compatibility(
        "m", "float32", "auto", f"{layout}, {shards.heads_of_rank} heads", block_size, "test/1", shards, converts
    )


@pytest.mark.parametrize("other", [engine(2), engine(block_size=32), engine(block_size=8), engine(layout="LBHNC")])
def test_engines_may_differ_where_the_transport_converts(other: Compatibility) -> None:
    assert why_incompatible(engine(), other) is None
    assert why_incompatible(other, engine()) is None


def test_without_conversion_ranks_may_differ_only_where_each_has_the_same_heads() -> None:
    one, two, four = (engine(ranks, converts=False) for ranks in (1, 2, 4))
    assert why_incompatible(two, four) is None
    reason = why_incompatible(one, engine(2, 32, converts=False))
    assert reason == (
        "the peer's KV cache is LBNHC, 1 heads with blocks of 32 tokens on 2 ranks, and this engine's is LBNHC, 2 "
        "heads with blocks of 16 tokens on 1 rank; the transport copies bytes as they are: give both engines the "
        "same block size, layout and tensor parallelism, or run them on one machine over ipc, which converts."
    )
    assert why_incompatible(two, engine(2, converts=True, block_size=32)) is not None  # one side alone cannot


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (engine(num_layers=3), "num_layers is 3 on the peer and 2 here"),
        (engine(num_kv_heads=4), "num_kv_heads is 4 on the peer and 2 here"),
        (engine(head_nbytes=128), "head_nbytes is 128 on the peer and 64 here"),
        (engine(interior="columns"), "interior is 'columns' on the peer and 'tokens' here"),
        (engine(ranks=2, block_size=24), "one block size must divide the other"),
        (engine(block_size=0), "one block size must divide the other"),
        (engine(ranks=3, num_kv_heads=2), "2 KV heads cannot be dealt out to the peer's 3 ranks evenly"),
    ],
)
def test_what_nothing_converts_is_refused_in_one_sentence(other: Compatibility, reason: str) -> None:
    assert reason in str(why_incompatible(engine(), other))


def test_blocks_of_which_nothing_is_known_but_their_heads_keep_their_size() -> None:
    ours = engine(interior="heads")
    assert why_incompatible(ours, engine(2, interior="heads")) is None
    assert "give both engines the same block size" in str(
        why_incompatible(ours, engine(2, block_size=32, interior="heads"))
    )


def test_an_engine_without_shards_meets_only_its_like() -> None:
    plain = Compatibility("m", "float32", "auto", "LBNHC", 16, "test/1", None, True)
    assert why_incompatible(plain, plain) is None
    other = Compatibility("m", "float32", "auto", "LBNHC", 32, "test/1", None, True)
    assert why_incompatible(plain, other) == (
        "block_size is 32 on the peer and 16 here; both must be the same to exchange KV."
    )
