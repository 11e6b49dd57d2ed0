"""`lifecycle.grow_live` on a GPU, with NIXL holding the cache registered before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

BEFORE, AFTER = 200, 900


class Registers:
    """The least that serves peers: a NIXL agent with one registration per extent."""

    registers_memory = True

    def __init__(self) -> None:
        nixl = pytest.importorskip("nixl", reason="NIXL is not installed")
        self._agent = nixl._api.nixl_agent("owner", nixl._api.nixl_agent_config(enable_prog_thread=False))
        self._held: Any = None
        self.registered: list[tuple[int, int]] = []
        self.published: list[int] = []
        self.open = True

    def pause_transfers(self, timeout_s: float) -> None:
        self.open = False

    def register_kv_cache(self, cache: Any) -> None:
        self.registered = [(extent.address, extent.nbytes) for extent in cache.extents()]
        ranges = [(address, nbytes, cache.driver.device_id, "") for address, nbytes in self.registered]
        self._held = self._agent.register_memory(ranges, "VRAM")

    def unregister_kv_cache(self) -> None:
        if self._held is not None:
            self._agent.deregister_memory(self._held)
        self._held, self.registered = None, []

    def publish(self, generation: int) -> None:
        self.published.append(generation)

    def resume_transfers(self) -> None:
        self.open = True


def test_a_decode_engine_grows_between_two_graph_replays_and_keeps_its_kv_registered(
    make_cache: Callable[..., Any],
) -> None:
    import torch

    from pdkv.lifecycle import extend, grow_live

    cache = make_cache(layers=4, num_blocks=1000)
    cache.commit(BEFORE // 2)
    connector = Registers()
    factory: Any = lambda config: connector  # noqa: E731
    factory.registers_memory = True
    extend(cache, BEFORE, factory)
    view, generation = cache.views()["layer2"], cache.generation
    ids = torch.arange(BEFORE, device="cuda")
    total = torch.zeros(view.shape[1:], dtype=torch.float32, device="cuda")
    view[:BEFORE] = torch.arange(1, BEFORE + 1, device="cuda").to(view.dtype).view(-1, 1, 1, 1)
    graph = torch.cuda.CUDAGraph()
    view.index_select(0, ids).float().sum(0)  # loads what capturing may not load
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total.copy_(view.index_select(0, ids).float().sum(0))
    graph.replay()
    expected = total.clone()
    assert bool((expected > 0).all())

    report = grow_live(cache, AFTER, connector)

    total.zero_()
    graph.replay()
    assert torch.equal(total, expected)
    assert bool((view[BEFORE:AFTER] == 0).all())
    assert (report.blocks, report.added_blocks, report.moved) == (AFTER, AFTER - BEFORE, True)
    assert cache.generation > generation
    assert connector.published == [cache.generation]
    assert connector.open
    assert connector.registered == [(extent.address, extent.nbytes) for extent in cache.extents()]
    assert len(connector.registered) == len(cache.segments)
    connector.unregister_kv_cache()
