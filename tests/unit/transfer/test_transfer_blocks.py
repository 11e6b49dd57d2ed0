"""Blocks are paired by their index in the prompt, and a mismatch is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ProtocolError
from pdkv.transfer.blocks import BlockPair, BlockRun, pair_by_index, require_committed, units_of

pytestmark = pytest.mark.cpu


@given(st.integers(0, 8), st.integers(0, 3))
def test_any_prefix_cached_on_decode_leaves_the_rest_with_its_own_indices(cached: int, extra: int) -> None:
    source = BlockRun(0, tuple(range(100, 108 + extra)))
    destination = BlockRun(cached, tuple(range(1, 9 - cached)))
    pairs = pair_by_index((source,), (destination,))
    assert [(pair.source - 100, pair.destination) for pair in pairs] == [
        (cached + offset, 1 + offset) for offset in range(8 - cached)
    ]


def test_a_sliding_window_on_prefill_keeps_its_place_in_the_prompt() -> None:
    full, window = BlockRun(0, (1, 2, 3, 4)), BlockRun(2, (7, 8))
    pairs = pair_by_index((full, window), (BlockRun(3, (21,)), BlockRun(3, (22,))))
    assert pairs == (BlockPair(0, 4, 21), BlockPair(1, 8, 22))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ((BlockRun(0, (1, 2)),), (BlockRun(0, (5, 6, 7)),)),
        ((BlockRun(1, (1, 2)),), (BlockRun(0, (5, 6)),)),
        ((BlockRun(0, (1, 2)),), (BlockRun(2, (5,)),)),
        ((BlockRun(0, ()),), (BlockRun(0, (5,)),)),
        ((BlockRun(0, (1,)), BlockRun(0, (2,))), (BlockRun(0, (5,)),)),
    ],
)
def test_an_index_that_only_decode_has_is_refused(
    source: tuple[BlockRun, ...], destination: tuple[BlockRun, ...]
) -> None:
    with pytest.raises(ProtocolError):
        pair_by_index(source, destination)


@pytest.mark.parametrize("ids", [(0,), (100,), (1, 100), (3, 3)])
def test_ids_that_are_not_committed_or_come_twice_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError):
        require_committed((BlockRun(0, ids),), 100)


def test_ids_may_not_repeat_across_groups_either() -> None:
    with pytest.raises(ProtocolError, match="twice"):
        require_committed((BlockRun(0, (1, 2)), BlockRun(0, (2,))), 100)
    require_committed((BlockRun(0, (1, 2)), BlockRun(0, (3,))), 100)


@given(st.sampled_from([(16, 32), (32, 16), (16, 16), (16, 64), (64, 16)]), st.integers(1, 300), st.data())
def test_each_token_that_decode_lacks_comes_from_its_place_whatever_the_block_sizes(
    sizes: tuple[int, int], num_tokens: int, data: st.DataObject
) -> None:
    theirs, ours = (list(range(100, 100 - (-num_tokens // size))) for size in sizes)
    cached = data.draw(st.integers(0, len(ours) - 1))  # blocks of decode, which may end within one of prefill
    runs = (BlockRun(0, tuple(theirs)),), (BlockRun(cached, tuple(ours[cached:])),)
    unit = min(sizes)
    found: dict[int, int] = {}  # token -> the one that goes there
    for pair in pair_by_index(*units_of(*runs, sizes, num_tokens)):
        place = (pair.destination - ours[0] * (sizes[1] // unit)) * unit
        source = (pair.source - theirs[0] * (sizes[0] // unit)) * unit
        found.update((place + token, source + token) for token in range(unit))
    assert all(place == source for place, source in found.items())
    assert set(range(cached * sizes[1], num_tokens)) <= set(found)
    assert max(found) < -(-num_tokens // unit) * unit  # nothing but the end of the last unit


def test_a_last_block_is_read_as_far_as_the_prompt_goes() -> None:
    source, destination = units_of((BlockRun(0, (5, 6, 7)),), (BlockRun(0, (1, 2)),), (16, 32), 40)
    assert pair_by_index(source, destination) == (BlockPair(0, 5, 2), BlockPair(0, 6, 3), BlockPair(0, 7, 4))


def test_a_cached_prefix_may_end_within_a_block_of_prefill() -> None:
    source, destination = units_of((BlockRun(0, (5, 6)),), (BlockRun(1, (8, 9)),), (32, 16), 40)
    assert pair_by_index(source, destination) == (BlockPair(0, 11, 8), BlockPair(0, 12, 9))


@pytest.mark.parametrize(
    ("sizes", "num_tokens", "message"),
    [((16, 24), 40, "one size must divide"), ((16, 0), 40, "one size must divide"), ((16, 32), 32, "behind the 32")],
)
def test_blocks_that_cannot_be_counted_in_units_are_refused(
    sizes: tuple[int, int], num_tokens: int, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        units_of((BlockRun(0, (1, 2, 3)),), (BlockRun(0, (4, 5)),), sizes, num_tokens)


def test_decode_may_not_want_more_than_prefill_has_in_other_blocks_either() -> None:
    with pytest.raises(ProtocolError, match="are wanted"):
        pair_by_index(*units_of((BlockRun(0, (1,)),), (BlockRun(0, (4, 5)),), (16, 32), 40))


def test_I14_a_peer_that_says_that_its_blocks_are_huge_costs_no_more_than_the_prompt() -> None:
    source, destination = units_of((BlockRun(0, (1, 2)),), (BlockRun(0, (4, 5)),), (2**50, 16), 20)
    assert pair_by_index(source, destination) == (BlockPair(0, 2**46, 4), BlockPair(0, 2**46 + 1, 5))
