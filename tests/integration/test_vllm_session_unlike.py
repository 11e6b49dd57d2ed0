"""The two halves of `PdkvConnector` between engines with other block sizes, layouts and ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from session_engines import BLOCK, HEADS, PD, Engine, arrive

from pdkv.transfer.base import PostedTransfer
from pdkv.transfer.fit import require_same_bytes
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.inproc import InprocTransport
from pdkv.transfer.transport import TransferState
from pdkv_connectors.ipc import IpcTransport

pytestmark = pytest.mark.vllm


def by_token(engine: Engine, blocks: list[int]) -> torch.Tensor:
    """``[layers, all heads, tokens, C]`` of these blocks, whatever lies where on how many ranks."""
    ranks = [torch.stack([view[blocks] for view in cache.views().values()]) for cache in engine.caches]
    return torch.cat(ranks, 2).transpose(1, 2).flatten(2, 3)


UNLIKE = [
    ({}, {"block_size": 32}),
    ({"block_size": 32}, {}),
    ({"heads": 4}, {"ranks": 2}),
    ({"ranks": 2}, {"ranks": 1, "heads": 4}),
    ({"ranks": 4, "heads": 1, "block_size": 32}, {"ranks": 2, "layout": "BLHNC"}),
    ({"layout": "LBHNC"}, {}),
]


@pytest.mark.parametrize(("there", "here"), UNLIKE)
@pytest.mark.parametrize("cached", [0, 32])
def test_a_prompt_moves_between_engines_that_are_unlike(there: Any, here: Any, cached: int) -> None:
    ipc = {"make_transport": IpcTransport}
    pd = PD(here={**here, **ipc}, **there, **ipc)
    sizes = [options.get("block_size", BLOCK) for options in (there, here)]
    theirs, ours = ([5, 9, 2, 7, 3][: -(-70 // size)] for size in sizes)
    request = arrive(pd, "d", pd.offer("p", theirs, 70), 70)
    pd.load(request, [*ours, 11], cached)
    pd.until(lambda: pd.decode.received == ["d"] and pd.prefill.sent == ["p"])
    assert not pd.decode.failed
    wanted, found = by_token(pd.prefill, theirs), by_token(pd.decode, [*ours, 11])
    assert torch.equal(found[:, :, cached:70], wanted[:, :, cached:70])
    assert not found[:, :, :cached].any()
    assert not found[:, :, 80:].any()  # 80: the last block of 16 that has a token of the prompt
    pd.close()


def test_what_arrived_is_zeroed_for_the_negative_control_in_larger_blocks_too() -> None:
    ipc = {"make_transport": IpcTransport}
    pd = PD(here={"block_size": 32, **ipc}, **ipc)
    pd.decode.workers[0]._zero = True
    request = arrive(pd, "d", pd.offer("p", [5, 9, 2, 7, 3], 70), 70)
    pd.load(request, [4, 6, 8])
    pd.until(lambda: pd.decode.received == ["d"])
    assert not by_token(pd.decode, [4, 6, 8]).any()
    pd.close()


def test_I11_a_rank_that_reads_from_several_has_ended_when_the_last_of_them_has() -> None:
    class HalfStuck(IpcTransport):
        """The second of its transfers ends when it is told to."""

        held = 0

        def _do_post(self, *args: Any, **options: Any) -> PostedTransfer:
            transfer = super()._do_post(*args, **options)
            HalfStuck.held += 1
            if HalfStuck.held == 2:
                look = transfer._look
                transfer._look = lambda: look() if HalfStuck.held == 0 else TransferState.RUNNING  # type: ignore[method-assign]
            return transfer

    pd = PD(here={"ranks": 1, "heads": 4, "make_transport": HalfStuck}, ranks=2, make_transport=IpcTransport)
    request = arrive(pd, "d", pd.offer("p", [1, 2, 3], 40), 40)
    pd.load(request, [7, 5, 9])
    pd.until(lambda: HalfStuck.held == 2)
    for _ in range(50):
        pd.prefill.step()
        pd.decode.step()
    assert not pd.decode.received
    assert not pd.prefill.sent
    HalfStuck.held = 0
    pd.until(lambda: pd.decode.received == ["d"] and pd.prefill.sent == ["p"])
    assert not pd.decode.failed
    pd.close()


@pytest.mark.parametrize(
    ("there", "here", "policy"), [*((*sides, "fail") for sides in UNLIKE), (*UNLIKE[0], "recompute")]
)
def test_a_transport_that_converts_nothing_refuses_engines_that_are_unlike(there: Any, here: Any, policy: str) -> None:
    pd = PD(policy=policy, here=here, **there)
    arrive(pd, "d", pd.offer("p", [1], 16), 16)
    counters = pd.decode.scheduler.session.counters  # type: ignore[union-attr]
    pd.until(lambda: counters.as_dict().get("failed_incompatible") == 1)
    assert counters.as_dict().get("recomputed", 0) == (policy == "recompute")
    assert pd.decode.scheduler.host.counts["reads"] == 0
    pd.decode.step()
    reason = pd.decode.scheduler._failed["d"]
    assert reason.startswith("incompatible: the peer's KV cache is ")
    for side, options in (("here", here), ("there", there)):
        words = f"{options.get('heads', HEADS)} heads of {options.get('block_size', BLOCK)} tokens"
        assert words in reason, side
    assert "over ipc, which converts" in reason
    pd.close()


def test_a_misfit_that_only_a_worker_finds_fails_the_request_by_its_name() -> None:
    class SaysThatItConverts(InprocTransport):
        """As `auto` where ipc is there, and does not reach this peer."""

        converts = True

        def _require_fit(self, ours: CacheGeometry, theirs: CacheGeometry) -> None:
            require_same_bytes(ours, theirs)

    pd = PD(here={"block_size": 32, "make_transport": SaysThatItConverts}, make_transport=SaysThatItConverts)
    request = arrive(pd, "d", pd.offer("p", [1], 16), 16)
    pd.load(request, [3])
    pd.until(lambda: pd.decode.received == ["d"])
    assert pd.decode.failed == ["d"]
    assert "incompatible: GeometryError: num_states of KV-cache group 0 is 16" in pd.decode.scheduler._failed["d"]
    assert pd.decode.workers[0].transport.counts["reads"] == 0  # type: ignore[union-attr]
    pd.close()


def test_an_engine_converts_where_all_of_its_ranks_do() -> None:
    pd = PD(ranks=2, make_transport=IpcTransport)
    ranks = {rank: worker.registration for rank, worker in enumerate(pd.prefill.workers)}
    assert pd.prefill.scheduler.host.register(ranks).descriptor.compatibility.converts
    one_cannot = {**ranks, 1: replace(ranks[1], converts=False)}
    assert not pd.prefill.scheduler.host.register(one_cannot).descriptor.compatibility.converts
    pd.close()
