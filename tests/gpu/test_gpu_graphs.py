"""CUDA graphs captured on a committed prefix, replayed after everything that can happen to the memory behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

WARMUP_BLOCKS = 40
IDS = 16


class Step:
    """One captured step of an engine: read blocks by id, compute, write the result to other blocks by id."""

    def __init__(self, cache: Any) -> None:
        import torch

        self.view = cache.views()["layer1"]
        self.read_ids = torch.arange(IDS, device="cuda")
        self.write_ids = torch.arange(IDS, 2 * IDS, device="cuda")
        self.result = torch.empty((IDS, *self.view.shape[1:]), dtype=self.view.dtype, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()

    def _run(self) -> None:
        self.result.copy_(self.view.index_select(0, self.read_ids) * 2 + 1)
        self.view.index_copy_(0, self.write_ids, self.result)

    def check(self, reads: Any, writes: Any) -> None:
        """Write fresh random blocks, replay, and compare what was read and what was written."""
        import torch

        self.read_ids.copy_(reads)
        self.write_ids.copy_(writes)
        data = torch.randn(self.result.shape, device="cuda").to(self.view.dtype)
        self.view.index_copy_(0, self.read_ids, data)
        self.result.fill_(float("nan"))
        self.graph.replay()
        expected = data * 2 + 1
        assert torch.equal(self.result, expected)
        assert torch.equal(self.view.index_select(0, self.write_ids), expected)


def distinct(low: int, high: int) -> tuple[Any, Any]:
    """Ids of blocks to read and of others to write, drawn from ``low..high-1``."""
    import torch

    ids = torch.randperm(high - low, device="cuda")[: 2 * IDS] + low
    return ids[:IDS], ids[IDS:]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda cache: None, id="nothing"),
        pytest.param(lambda cache: cache.commit(1000), id="growth"),
        pytest.param(lambda cache: cache.commit(1000, defragment=True), id="defragmentation"),
        pytest.param(lambda cache: cache.commit(1000, defragment=True, preserve=True), id="preserving"),
        pytest.param(lambda cache: cache.commit(36, shrink=True), id="shrink"),
        pytest.param(lambda cache: (cache.release_physical(), cache.recommit()), id="sleep"),
        pytest.param(
            lambda cache: (
                cache.commit(500),
                cache.commit(1000, defragment=True),
                cache.release_physical(),
                cache.recommit(),
                cache.commit(300, shrink=True),
                cache.commit(900),
            ),
            id="all-of-them",
        ),
    ],
)
def test_a_graph_captured_on_the_prefix_replays_right_after(
    make_cache: Callable[..., Any], change: Callable[[Any], Any]
) -> None:
    cache = make_cache()
    cache.commit(WARMUP_BLOCKS)
    step = Step(cache)
    step.check(*distinct(0, WARMUP_BLOCKS))
    change(cache)
    blocks = cache.num_committed_blocks
    step.check(*distinct(0, blocks))
    if blocks > WARMUP_BLOCKS + 2 * IDS:
        step.check(*distinct(WARMUP_BLOCKS, blocks))


def test_memory_is_not_taken_from_under_a_kernel_in_flight(make_cache: Callable[..., Any]) -> None:
    import torch

    cache = make_cache()
    cache.commit(1000)
    view = cache.views()["layer0"]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # clock cycles, some 100 ms
        view[:1000].fill_(1.0)
    cache.commit(100, shrink=True)  # would fault the kernel, and with it the context, if it did not wait
    torch.cuda.synchronize()
    assert bool((view[:100] == 0).all())
