"""A rank of `PdkvConnector` and peers that do not answer its transport: they hold up their own transfers only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

import pdkv
from pdkv.errors import TransferTimeoutError
from pdkv.testing.transports.silent import SilentPeers
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.messages import FailCode
from pdkv_connectors.vllm import session_worker
from pdkv_connectors.vllm.session_orders import Connect, Disconnect, Failure, Order, Post, Rank
from pdkv_connectors.vllm.session_worker import SessionWorker

pytestmark = pytest.mark.vllm

BLOCKS = 8


@dataclass
class Ranks:
    """A rank of D, and of P and Q whose blocks it reads; block `n` of P holds `n`, of Q `100 + n`."""

    workers: dict[str, SessionWorker] = field(default_factory=dict)
    caches: dict[str, pdkv.GrowableKVCache] = field(default_factory=dict)
    posted: int = 0

    def add(self, name: str, first: int) -> None:
        spec = pdkv.AttentionSpec(num_kv_heads=2, block_size=16, head_size=8, dtype="float32")
        config = pdkv.KVCacheConfig.uniform(["a", "b"], spec, BLOCKS, pdkv.KVCacheLayout.LBNHC)
        cache = pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=65536))
        cache.commit(BLOCKS, defragment=True)
        for view in cache.views().values():
            view[:] = torch.arange(first, first + BLOCKS, dtype=torch.float32).view(-1, 1, 1, 1)
        worker = SessionWorker(SilentPeers, name, 0, shape="as the others")
        worker.register(cache)
        self.workers[name], self.caches[name] = worker, cache

    def know(self, name: str) -> Connect:
        registered = self.workers[name].registration
        return Connect(((Rank(registered.engine, registered.metadata),),))

    def post(self, name: str, source: int, destination: int) -> Post:
        self.posted += 1
        engine = self.workers[name].registration.engine
        return Post(self.posted, ((engine,),), (BlockPair(0, source, destination),), reads=True)

    def step(self, *orders: Order) -> dict[int, Failure | None]:
        """One of vLLM's: what has ended, by its number."""
        self.workers["D"].work_off(list(orders))
        reports = self.workers["D"].collect()
        return {} if reports is None else {number: of_ranks[0] for number, of_ranks in reports.ended.items()}

    def block(self, number: int) -> float:
        (value,) = {view[number].unique().item() for view in self.caches["D"].views().values()}
        return float(value)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """P is silent."""
    monkeypatch.setattr(session_worker, "MEETING_S", 1e-3)
    SilentPeers.reset("P")
    ranks = Ranks()
    for name, first in (("P", 0), ("Q", 100), ("D", 1000)):
        ranks.add(name, first)
    yield ranks
    for worker in ranks.workers.values():
        worker.unregister()
    for cache in ranks.caches.values():
        cache.close()
    assert SilentPeers.waiting == 0, "nobody is waited for any more"


def test_a_peer_that_does_not_answer_holds_up_its_own_transfers_only(ranks: Ranks) -> None:
    silent = [ranks.post("P", 1, 1), ranks.post("P", 2, 2)]
    assert ranks.step(ranks.know("P"), *silent) == {}
    for number in range(3, 6):
        other = ranks.post("Q", number, number)
        assert ranks.step(ranks.know("Q"), other) == {other.number: None}
        assert ranks.block(number) == 100 + number
    assert [ranks.block(1), ranks.block(2)] == [1001, 1002]
    SilentPeers.silent.clear()
    assert ranks.step() == {post.number: None for post in silent}
    assert [ranks.block(1), ranks.block(2)] == [1, 2]
    assert SilentPeers.attempts == 4  # one of P, and one for each time that Q was described anew


def test_a_peer_that_answers_at_once_is_met_and_read_from_within_the_step(ranks: Ranks) -> None:
    SilentPeers.silent.clear()
    post = ranks.post("P", 7, 1)
    assert ranks.step(ranks.know("P"), post) == {post.number: None}
    assert ranks.block(1) == 7


def test_a_peer_that_cannot_be_met_fails_all_that_waits_for_it_and_is_met_anew_for_what_comes_later(
    ranks: Ranks,
) -> None:
    first, second = ranks.post("P", 1, 1), ranks.post("P", 2, 2)
    ranks.step(ranks.know("P"), first, second)
    SilentPeers.refuses["P"] = TransferTimeoutError("P does not answer")
    SilentPeers.silent.clear()
    ended = ranks.step()
    assert ended.keys() == {first.number, second.number}
    for failure in ended.values():
        assert failure == Failure("TransferTimeoutError: P does not answer", FailCode.POST_FAILED)
    assert ranks.block(1) == 1001
    SilentPeers.refuses.clear()
    third = ranks.post("P", 3, 3)
    assert ranks.step(third) == {third.number: None}
    assert ranks.block(3) == 3


def test_what_waits_for_a_peer_that_is_forgotten_fails_and_posts_nothing(ranks: Ranks) -> None:
    post = ranks.post("P", 1, 1)
    ranks.step(ranks.know("P"), post)
    (failure,) = ranks.step(Disconnect((("P",),))).values()
    assert failure is not None
    SilentPeers.silent.clear()
    assert ranks.step() == {}
    assert ranks.block(1) == 1001


def test_a_peer_in_a_new_generation_takes_the_place_of_one_that_was_waited_for(ranks: Ranks) -> None:
    old = ranks.post("P", 1, 1)
    ranks.step(ranks.know("P"), old)
    ranks.workers["P"].unregister()
    ranks.workers["P"].register(ranks.caches["P"])
    SilentPeers.silent.clear()
    new = ranks.post("P", 2, 2)
    ended = ranks.step(ranks.know("P"), new)
    assert ended[old.number] is not None
    assert ended[new.number] is None
    assert [ranks.block(1), ranks.block(2)] == [1001, 2]


def test_a_rank_that_goes_to_sleep_waits_for_nobody(ranks: Ranks) -> None:
    ranks.step(ranks.know("P"), ranks.post("P", 1, 1))
    assert SilentPeers.waiting == 1
    ranks.workers["D"].unregister()
    assert SilentPeers.waiting == 0
    ranks.workers["D"].register(ranks.caches["D"])
    assert ranks.step() == {}


def test_a_step_gives_a_silent_peer_its_first_moment_and_none_later(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(session_worker, "MEETING_S", 60.0)
    real = time.sleep

    def answer_after_three(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            SilentPeers.silent.clear()
        real(seconds)

    monkeypatch.setattr(time, "sleep", answer_after_three)
    post = ranks.post("P", 4, 4)
    assert ranks.step(ranks.know("P"), post) == {post.number: None}
    assert len(pauses) == 3

    SilentPeers.silent.add("P")
    monkeypatch.setattr(session_worker, "MEETING_S", 0.0)
    late = [ranks.post("P", 5, 5), ranks.post("P", 6, 6)]
    ranks.step(ranks.know("P"), late[0])
    monkeypatch.setattr(session_worker, "MEETING_S", 60.0)
    assert ranks.step(late[1]) == {}
    assert len(pauses) == 3
