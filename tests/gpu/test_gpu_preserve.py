"""Defragmentation that keeps contents, over arbitrary histories of a cache on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.gpu

CAPACITY = 400
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "defragment", "preserve", "shrink", "shrink_preserving", "sleep"]),
        st.integers(0, CAPACITY),
    ),
    min_size=1,
    max_size=8,
)


class Model:
    """What each block must hold: the value last written to it, or zero."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.values = [0] * CAPACITY
        self.next = 1

    def apply(self, operation: str, blocks: int) -> None:
        """Do it, and expect of every block what the report promises."""
        before = self.cache.num_committed_blocks
        if operation == "sleep":
            self.cache.release_physical()
            self.cache.recommit()
            self.values = [0] * CAPACITY
            return
        report = self.cache.commit(
            blocks,
            defragment=operation in ("defragment", "preserve"),
            shrink=operation.startswith("shrink"),
            preserve=operation in ("preserve", "shrink_preserving"),
        )
        kept = min(before, report.blocks) if report.contents_kept else 0
        if operation in ("preserve", "shrink_preserving", "grow"):
            assert report.contents_kept
        self.values[kept:] = [0] * (CAPACITY - kept)

    def write(self) -> None:
        """Give every committed block a value of its own, small enough to be exact in bfloat16."""
        import torch

        blocks = self.cache.num_committed_blocks
        values = [(self.next + block) % 251 + 1 for block in range(blocks)]
        self.next += 17
        self.values[:blocks] = values
        for view in self.cache.views().values():
            view[:blocks] = torch.tensor(values, dtype=view.dtype, device=view.device).view(-1, 1, 1, 1)

    def check(self) -> None:
        """Every element of every committed block."""
        import torch

        blocks = self.cache.num_committed_blocks
        for view in self.cache.views().values():
            expected = torch.tensor(self.values[:blocks], dtype=view.dtype, device=view.device).view(-1, 1, 1, 1)
            assert bool((view[:blocks] == expected).all())


@given(history=OPERATIONS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_contents_survive_what_promises_to_keep_them(
    make_cache: Callable[..., Any], history: list[tuple[str, int]]
) -> None:
    cache = make_cache(layers=2, num_blocks=CAPACITY)
    model = Model(cache)
    pointers = [view.data_ptr() for view in cache.views().values()]
    for operation, blocks in history:
        model.apply(operation, blocks)
        model.check()
        model.write()
        model.check()
    assert [view.data_ptr() for view in cache.views().values()] == pointers
    cache.close()


def test_without_spare_memory_for_one_segment_it_is_refused_and_nothing_is_lost(
    make_cache: Callable[..., Any], driver: Any
) -> None:
    from pdkv.errors import OutOfMemoryError

    page = 64 << 10
    free = driver.memory_info().free
    blocks = free * 6 // 10 // page // 32 * 32
    cache = make_cache(layers=1, num_blocks=blocks)
    cache.commit(blocks // 64 * 32)
    cache.commit(blocks)
    view = cache.views()["layer0"]
    view[:blocks].fill_(3.0)
    generation = cache.generation
    with pytest.raises(OutOfMemoryError):
        cache.commit(blocks, defragment=True, preserve=True)
    assert cache.generation == generation
    assert bool((view[: blocks // 100] == 3.0).all())
    assert bool((view[blocks - blocks // 100 : blocks] == 3.0).all())
