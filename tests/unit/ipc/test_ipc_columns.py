"""Checks of block ids: those of few ids, by Python's loops, and those of many, by numpy, say the same."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv_connectors.ipc.columns import FEW, BlockColumns, are_within

pytestmark = pytest.mark.cpu

SOURCES, DESTINATIONS = [400, 9], [300, 9]


def columns(count: int, *, group: int = 0, **changed: int) -> list[BlockColumns]:
    """`count` good pairs, of which the last source or destination is another one."""
    source, destination = np.arange(count, dtype=np.int32) + 50, np.arange(count, dtype=np.int32) + 60
    for name, number in changed.items():
        {"source": source, "destination": destination}[name][-1] = number
    return [BlockColumns(source, destination, group)]


@pytest.mark.parametrize("count", [1, 2, FEW, FEW + 1, 200])
def test_ids_that_are_there_pass_up_to_the_last_one(count: int) -> None:
    assert are_within(columns(count), 2, SOURCES, DESTINATIONS)
    assert are_within(columns(count, source=399, destination=299), 2, SOURCES, DESTINATIONS)


@pytest.mark.parametrize("count", [1, 2, FEW, FEW + 1, 200])
@pytest.mark.parametrize(
    "changed", [{"source": 400}, {"source": -1}, {"destination": 300}, {"destination": -1}, {"group": 2}, {"group": -1}]
)
def test_one_id_that_is_not_there_is_refused_among_however_many(count: int, changed: dict[str, int]) -> None:
    assert not are_within(columns(count, **changed), 2, SOURCES, DESTINATIONS)


@pytest.mark.parametrize("count", [2, FEW, FEW + 1, 200])
def test_a_destination_that_occurs_twice_is_refused(count: int) -> None:
    assert not are_within(columns(count, destination=60), 2, SOURCES, DESTINATIONS)


def test_no_pair_at_all_is_refused() -> None:
    assert not are_within(columns(0), 2, SOURCES, DESTINATIONS)


@pytest.mark.parametrize("count", [2, FEW, FEW + 1, 200])
def test_what_is_moved_is_what_was_checked_though_the_callers_arrays_are_used_again(count: int) -> None:
    ids, places = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32) + 7
    part = BlockColumns(ids, places)
    ids[:] = places[:] = 2_000_000_000  # those of the next step, say
    assert are_within([part], 1, [400], [300])
    assert part.source.tolist() == list(range(count))
    assert part.destination.tolist() == list(range(7, count + 7))
