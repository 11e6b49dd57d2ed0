"""A rank of `PdkvConnector` and peers that do not answer its transport: they hold up their own transfers only."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

import pdkv
from pdkv.errors import TransferTimeoutError
from pdkv.testing.transports.silent import SilentPeers
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.messages import EngineRef, FailCode
from pdkv_connectors.vllm import session_worker
from pdkv_connectors.vllm.session_orders import Connect, Disconnect, Failure, Order, Post, Rank, Rebuild
from pdkv_connectors.vllm.session_worker import SessionWorker

pytestmark = pytest.mark.vllm

BLOCKS = 8


@dataclass
class Ranks:
    """A rank of D, and of P and Q whose blocks it reads; block `n` of P holds `n`, of Q `100 + n`."""

    workers: dict[str, SessionWorker] = field(default_factory=dict)
    caches: dict[str, pdkv.GrowableKVCache] = field(default_factory=dict)
    posted: int = 0

    def add(self, name: str, first: int, num_blocks: int = BLOCKS) -> None:
        spec = pdkv.AttentionSpec(num_kv_heads=2, block_size=16, head_size=8, dtype="float32")
        config = pdkv.KVCacheConfig.uniform(["a", "b"], spec, num_blocks, pdkv.KVCacheLayout.LBNHC)
        cache = pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=65536))
        cache.commit(num_blocks, defragment=True)
        worker = SessionWorker(SilentPeers, name, 0, shape="as the others")
        worker.register(cache)
        self.workers[name], self.caches[name] = worker, cache
        self.fill(name, first)

    def fill(self, name: str, first: int) -> None:
        for view in self.caches[name].views().values():
            view[:] = torch.arange(first, first + len(view), dtype=torch.float32).view(-1, 1, 1, 1)

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


class Walk:
    """D among peers that answer, refuse, are silent, sleep and come back, as chance has it.

    Block `n` of a peer in its generation `g` holds `FIRST[peer] + 100 g + n`; each transfer has a block of D's own.
    """

    FIRST: ClassVar = {"P": 0, "Q": 10_000, "R": 20_000}
    UNWRITTEN = 90_000

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks = Ranks()
        self.known: dict[str, EngineRef] = {}
        self.open: dict[int, Post] = {}
        self.loaded = self.failed = 0
        for name in self.FIRST:
            self.ranks.add(name, 0)
            self.fill(name)
        self.ranks.add("D", self.UNWRITTEN, num_blocks=512)

    def fill(self, name: str) -> None:
        generation = self.ranks.workers[name].registration.engine.generation
        self.ranks.fill(name, self.FIRST[name] + 100 * generation)

    def peers(self, of: Iterable[str]) -> list[str]:
        choice = list(of)
        return self.random.sample(choice, min(len(choice), self.random.choice([1, 1, 2])))

    def happen(self) -> None:
        """What peers do, and what D does beside its steps."""
        name, what = self.random.choice("PQR"), self.random.randrange(30)
        worker = self.ranks.workers[name]
        if what < 4:
            SilentPeers.silent.symmetric_difference_update({name})
        elif what < 6:
            if SilentPeers.refuses.pop(name, None) is None:
                SilentPeers.refuses[name] = TransferTimeoutError("it says no")
        elif what == 6:
            worker.unregister()
        elif what == 7:
            self.ranks.workers["D"].unregister()
            self.ranks.workers["D"].register(self.ranks.caches["D"])
            self.open.clear()
        elif worker.transport is None:
            worker.register(self.ranks.caches[name])
            self.fill(name)

    def order(self) -> Order | None:
        registered = [name for name in self.FIRST if self.ranks.workers[name].transport is not None]
        what = self.random.randrange(40)
        if what == 0:
            self.open.clear()  # of those before it nobody hears any more
            return Rebuild()
        if what < 3:
            return Disconnect((tuple(self.peers(self.FIRST)),))
        if what < 15 and registered:
            found = {name: self.ranks.workers[name].registration for name in self.peers(registered)}
            self.known.update({name: registration.engine for name, registration in found.items()})
            return Connect((tuple(Rank(of.engine, of.metadata) for of in found.values()),))
        if not self.known:
            return None
        self.ranks.posted += 1
        pair = BlockPair(0, self.random.randrange(BLOCKS), self.ranks.posted)
        post = Post(pair.destination, (tuple(self.known[name] for name in self.peers(self.known)),), (pair,), True)
        self.open[post.number] = post
        return post

    def step(self, num_orders: int) -> None:
        orders = [order for order in (self.order() for _ in range(num_orders)) if order is not None]
        for number, failure in self.ranks.step(*orders).items():
            self.check(self.open.pop(number), failure)

    def check(self, post: Post, failure: Failure | None) -> None:
        ((peers,), (pair,)) = post.ranks, post.pairs
        found = self.ranks.block(pair.destination)
        if failure is None:
            self.loaded += 1
            assert found in [self.FIRST[peer.engine_id] + 100 * peer.generation + pair.source for peer in peers]
        else:
            self.failed += 1
            assert len(peers) > 1 or found == self.UNWRITTEN + pair.destination

    def end(self) -> None:
        SilentPeers.silent.clear()
        for _ in range(2):
            self.step(0)
        assert not self.open, "each ends once"
        assert SilentPeers.waiting == 0
        for worker in self.ranks.workers.values():
            worker.unregister()
        for cache in self.ranks.caches.values():
            cache.close()


def test_whatever_peers_do_each_transfer_ends_once_and_has_read_from_the_generation_that_it_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_worker, "MEETING_S", 0.0)
    loaded = failed = 0
    for seed in range(8):
        SilentPeers.reset()
        walk = Walk(seed)
        for _ in range(100):
            walk.happen()
            walk.step(walk.random.randrange(4))
        walk.end()
        loaded, failed = loaded + walk.loaded, failed + walk.failed
    assert loaded > 50
    assert failed > 50
