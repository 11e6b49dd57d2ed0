"""Blocks are paired by their index in the prompt, and a mismatch is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ProtocolError
from pdkv.transfer.blocks import BlockPair, BlockRun, pair_by_index, require_committed

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
