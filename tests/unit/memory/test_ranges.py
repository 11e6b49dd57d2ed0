"""Ranges kept in order, against a set of the bytes that they cover."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.memory._ranges import RangeSet

pytestmark = pytest.mark.cpu

ranges = st.tuples(st.integers(0, 30), st.integers(1, 8))


@given(st.lists(ranges, max_size=8), ranges)
def test_a_range_is_free_where_no_byte_of_it_is_covered(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    kept, covered = RangeSet(), set[int]()
    for start, nbytes in added:
        free = not covered & set(range(start, start + nbytes))
        assert kept.is_free(start, nbytes) == free == (not kept.overlapping(start, nbytes))
        if free:
            kept.add(start, nbytes)
            covered |= set(range(start, start + nbytes))
    assert kept.is_free(*asked) == (not covered & set(range(asked[0], sum(asked))))
