"""Two sessions whose transports are slow to meet, refuse, sleep, wake and are rebuilt, as chance has it."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from session_pair import SessionPair, contents, fill, run

from pdkv.errors import LeasesHeldError, TransferTimeoutError
from pdkv.testing.transports.silent import SilentPeers
from pdkv.transfer import ConsumerSettings
from pdkv.transfer.actions import Failed, FreeBlocks, Loaded
from pdkv.transfer.session import Session

pytestmark = pytest.mark.cpu

BLOCKS = {"P": range(1, 40), "D": range(1, 24)}


class Walk:
    """Requests of one block each. What P frees is written over at once, as a pool would.

    Attributes:
        waiting: request -> its block on D, and what that has to hold.
    """

    def __init__(self, mode: str, seed: int) -> None:
        SilentPeers.reset()
        self.mode, self.random = mode, random.Random(seed)
        make = partial(SilentPeers, copies_per_poll=self.random.choice([None, 1]))
        self.pair = SessionPair(make_transport=make, decode=ConsumerSettings(mode=mode))
        self.free = {name: list(of) for name, of in BLOCKS.items()}
        self.waiting: dict[str, tuple[int, torch.Tensor]] = {}
        self.asleep: set[str] = set()
        self.asked = self.loaded = 0

    def session(self, name: str) -> Session:
        return self.pair.prefill if name == "P" else self.pair.decode

    def ask(self) -> None:
        if self.asleep or not all(self.free.values()):
            return
        self.asked += 1
        name, source, destination = f"r{self.asked}", self.free["P"].pop(), self.free["D"].pop()
        fill(self.pair.caches[0], [source], self.asked)
        reference = self.pair.prefill.offer(name, run(source), 16)
        self.waiting[name] = (destination, contents(self.pair.caches[0], [source]))
        self.pair.decode.arrived(name, reference, 16)
        self.pair.decode.allocated(name, run(destination))

    def happen(self) -> None:
        what, name = self.random.randrange(30), self.random.choice("PD")
        if what < 12:
            self.ask()
        elif what < 16:
            SilentPeers.silent.symmetric_difference_update({name})
        elif what < 18:
            if SilentPeers.refuses.pop(name, None) is None:
                SilentPeers.refuses[name] = TransferTimeoutError("it says no")
        elif what < 20 and self.waiting:
            gone = self.random.choice(list(self.waiting))
            self.pair.decode.gone(gone, "client gone")
            del self.waiting[gone]
        elif what < 22:
            self.sleep_or_wake(name)
        elif what == 22 and name not in self.asleep:
            self.session(name)._rebuild("a test wants it")

    def sleep_or_wake(self, name: str) -> None:
        if name in self.asleep:
            self.session(name).wake()
            self.asleep.remove(name)
            return
        try:
            self.session(name).sleep("abort", timeout_s=1e-3)
        except LeasesHeldError:
            return
        self.asleep.add(name)

    def settle(self, seconds: float) -> None:
        self.pair.settle(seconds)
        if self.mode == "pull":
            assert self.pair.decode.metrics()["quarantined_blocks"] == 0, "nothing is left that may still be written"
        events, self.pair.events = self.pair.events, {"P": [], "D": []}
        for name in "PD":
            for event in events[name]:
                if isinstance(event, FreeBlocks):
                    self.freed(name, event)
                elif isinstance(event, Loaded):
                    self.has_loaded(event.request_id)
                else:
                    assert isinstance(event, Failed)
                    del self.waiting[event.request_id]

    def freed(self, name: str, event: FreeBlocks) -> None:
        for block in event.block_ids:
            assert block not in self.free[name], "it is freed once"
            self.free[name].append(block)
        if name == "P" and "P" not in self.asleep:
            fill(self.pair.caches[0], list(event.block_ids), seed=99_999)

    def has_loaded(self, request_id: str) -> None:
        destination, wanted = self.waiting.pop(request_id)
        self.loaded += 1
        self.free["D"].append(destination)
        if "D" not in self.asleep:  # else its memory has gone since
            assert torch.equal(contents(self.pair.caches[1], [destination]), wanted)

    def end(self) -> None:
        SilentPeers.silent.clear()
        SilentPeers.refuses.clear()
        for name in sorted(self.asleep):
            self.session(name).wake()
        self.asleep.clear()
        for _ in range(60):
            self.settle(2.0)
        assert not self.waiting, "each ends"
        assert {name: sorted(free) for name, free in self.free.items()} == {n: list(of) for n, of in BLOCKS.items()}
        assert SilentPeers.waiting == 0
        before = self.loaded
        self.ask()
        self.settle(0.0)
        assert self.loaded == before + 1, "the two still reach each other"
        self.pair.close()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_whatever_becomes_of_meetings_each_request_ends_once_and_both_sides_have_all_blocks_back(mode: str) -> None:
    loaded = 0
    for seed in range(6):
        walk = Walk(mode, seed)
        for _ in range(80):
            walk.happen()
            walk.settle(walk.random.choice([0.0, 0.0, 0.01, 0.5, 2.0]))
        walk.end()
        loaded += walk.loaded
    assert loaded > 20
