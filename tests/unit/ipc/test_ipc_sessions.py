"""Sessions of engines whose blocks and layouts differ, over the ipc transport in one process."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
import torch

import pdkv
from pdkv.transfer import BlockRun, Compatibility, LocalHost, Session
from pdkv.transfer.actions import Failed, FreeBlocks, Loaded
from pdkv.transfer.inproc_carrier import InprocNetwork
from pdkv.transfer.session import Event, Role
from pdkv.transfer.shards import Shards
from pdkv_connectors.ipc import IpcTransport

pytestmark = pytest.mark.cpu

PROMPT, DEADLINE_S = 75, 30.0
BLOCKS = {16: [3, 8, 1, 5, 2], 32: [4, 1, 7]}


class Engine:
    """A session over a cache of its own."""

    def __init__(
        self, network: InprocNetwork, stack: ExitStack, role: Role, block_size: int, layout: str, *, converts: bool
    ) -> None:
        spec = pdkv.AttentionSpec(num_kv_heads=2, block_size=block_size, head_size=8, dtype="float32")
        config = pdkv.KVCacheConfig.uniform(["a", "b"], spec, 12, pdkv.KVCacheLayout[layout])
        self.cache = stack.enter_context(pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=65536)))
        self.cache.commit(12)
        shards = Shards.of(config, 2, 1)
        like = Compatibility("m", "float32", "auto", layout, block_size, "test/1", shards, converts)
        host = LocalHost(IpcTransport, self.cache, role, like)
        self.session = Session(host, network.carrier(role), role=role)
        stack.callback(self.session.close)
        self.events: list[Event] = []

    def tokens(self, blocks: list[int]) -> torch.Tensor:
        """``[layers, H, tokens, C]``."""
        return torch.stack([view[blocks].transpose(0, 1).flatten(1, 2) for view in self.cache.views().values()])


def run(
    stack: ExitStack, there: tuple[int, str], here: tuple[int, str], cached: int, converts: bool = True
) -> list[Engine]:
    """One request through P and D, of which D has `cached` blocks."""
    network, engines = InprocNetwork(), []
    for role, (block_size, layout) in (("prefill", there), ("decode", here)):
        engines.append(Engine(network, stack, role, block_size, layout, converts=converts))  # type: ignore[arg-type]
    prefill, decode = engines
    for view in prefill.cache.views().values():
        view.copy_(torch.rand(view.shape))
    reference = prefill.session.offer("p", [BlockRun(0, tuple(BLOCKS[there[0]]))], PROMPT)
    decode.session.arrived("d", reference, PROMPT)
    decode.session.allocated("d", [BlockRun(cached, tuple(BLOCKS[here[0]][cached:]))])
    deadline = time.monotonic() + DEADLINE_S
    while not (decode.events and prefill.events) and time.monotonic() < deadline:
        for engine in engines:
            engine.events += engine.session.poll()
    return engines


@pytest.mark.parametrize("cached", [0, 1])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        ((16, "LBNHC"), (32, "LBNHC")),
        ((32, "LBNHC"), (16, "LBNHC")),
        ((16, "LBNHC"), (16, "LBHNC")),
        ((32, "BLHNC"), (16, "LBNHC")),
    ],
)
def test_the_tokens_that_decode_lacks_arrive(there: tuple[int, str], here: tuple[int, str], cached: int) -> None:
    with ExitStack() as stack:
        prefill, decode = run(stack, there, here, cached)
        assert decode.events == [Loaded("d")]
        assert prefill.events == [FreeBlocks("p", tuple(BLOCKS[there[0]]))]
        wanted, found = (engine.tokens(BLOCKS[size]) for engine, size in ((prefill, there[0]), (decode, here[0])))
        first = cached * here[0]
        assert torch.equal(found[:, :, first:PROMPT], wanted[:, :, first:PROMPT])
        assert not found[:, :, :first].any()


def test_engines_that_do_not_say_that_they_convert_refuse_each_other_before_anything_is_posted() -> None:
    with ExitStack() as stack:
        _, decode = run(stack, (16, "LBNHC"), (32, "LBNHC"), 0, converts=False)
        failed = [event for event in decode.events if isinstance(event, Failed)]
        assert [event.code for event in failed] == ["incompatible"]
        assert "blocks of 16 tokens" in failed[0].reason
        assert "blocks of 32 tokens" in failed[0].reason
        assert decode.session.host.describe_state().get("reads", 0) == 0
