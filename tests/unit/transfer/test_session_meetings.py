"""Peers that do not answer a transport at once: their transfers wait for that, and nobody else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from session_pair import SessionPair, contents, make_cache, make_session, run

from pdkv.errors import TransferTimeoutError
from pdkv.testing.transports.silent import SilentPeers
from pdkv.transfer import ConsumerSettings, FailCode
from pdkv.transfer.actions import Failed, FreeBlocks, Loaded

pytestmark = pytest.mark.cpu

MINE = (7, 3)


@pytest.fixture
def pair() -> Iterator[SessionPair]:
    """P is silent."""
    SilentPeers.reset("P")
    pair = SessionPair(make_transport=SilentPeers)
    yield pair
    pair.close()
    assert SilentPeers.waiting == 0, "nobody is waited for any more"


def ask(pair: SessionPair) -> None:
    """A request whose READ waits for P's transport, P having said that its lease lives."""
    pair.decode.arrived("r", pair.offer("r", [4, 5]), 32)
    pair.decode.allocated("r", run(*MINE))
    pair.settle()
    assert SilentPeers.waiting == 1
    assert not pair.events["D"]
    assert not pair.decode._running


def test_a_read_is_posted_when_its_peer_is_connected(pair: SessionPair) -> None:
    ask(pair)
    assert pair.decode._found(worked=False).polls, "its thread looks again"
    SilentPeers.silent.clear()
    pair.settle()
    assert pair.of("D", Loaded) == [Loaded("r")]
    assert torch.equal(contents(pair.caches[1], list(MINE)), contents(pair.caches[0], [4, 5]))
    assert not pair.decode._found(worked=False).polls


def test_requests_of_other_peers_go_on_meanwhile(pair: SessionPair) -> None:
    ask(pair)
    cache = make_cache(40)
    other = make_session(pair.network, "Q", "prefill", cache, clock=pair.clock)
    pair.decode.arrived("s", other.offer("s", run(1), 16), 16)
    pair.decode.allocated("s", run(9))
    for _ in range(5):
        other.poll()
        pair.settle()
    assert pair.of("D", Loaded) == [Loaded("s")]
    other.close()
    cache.close()


def test_the_lease_of_a_request_that_waits_is_renewed(pair: SessionPair) -> None:
    ask(pair)
    for _ in range(50):
        pair.settle(1.0)
    assert not pair.of("P", FreeBlocks)
    SilentPeers.silent.clear()
    pair.settle()
    assert pair.of("D", Loaded) == [Loaded("r")]


def test_a_request_fails_where_its_peer_cannot_be_connected(pair: SessionPair) -> None:
    ask(pair)
    SilentPeers.silent.clear()
    SilentPeers.refuses["P"] = TransferTimeoutError("P did not answer")
    pair.settle()
    (failed,) = pair.of("D", Failed)
    assert failed.code is FailCode.TIMED_OUT
    assert "P did not answer" in failed.reason
    assert pair.of("D", FreeBlocks) == [FreeBlocks("r", MINE)]
    assert pair.of("P", FreeBlocks) == [FreeBlocks("r", (4, 5))]
    assert pair.decode.counters["peers_refused_by_transport"] == 1


def test_a_decode_that_could_not_be_reached_once_is_written_to_when_it_answers_again() -> None:
    SilentPeers.reset("D")
    pair = SessionPair(make_transport=SilentPeers, decode=ConsumerSettings(mode="push"))
    ask(pair)
    SilentPeers.silent.clear()
    SilentPeers.refuses["D"] = TransferTimeoutError("D did not answer")
    pair.settle()
    (failed,) = pair.of("D", Failed)
    assert "D did not answer" in failed.reason
    SilentPeers.refuses.clear()
    for name, source, destination in (("s", 6, 9), ("t", 8, 11)):
        pair.decode.arrived(name, pair.offer(name, [source]), 16)
        pair.decode.allocated(name, run(destination))
        pair.settle()
        assert torch.equal(contents(pair.caches[1], [destination]), contents(pair.caches[0], [source]))
    assert pair.of("D", Loaded) == [Loaded("s"), Loaded("t")]
    assert SilentPeers.attempts == 2
    pair.close()


def client_gone(pair: SessionPair) -> None:
    pair.decode.gone("r", "client gone")
    pair.settle()


def p_refuses(pair: SessionPair) -> None:
    pair.clock.now += 100  # its lease runs out before D, whose clock is behind, hears of it
    pair.prefill.poll()
    pair.clock.now -= 100
    pair.prefill.sleep()
    pair.settle(10.0)


def preempted(pair: SessionPair) -> None:
    assert pair.decode.preempted("r")
    pair.settle()


@pytest.mark.parametrize("end", [client_gone, p_refuses, preempted], ids=lambda end: end.__name__)
def test_blocks_of_a_read_that_was_never_posted_are_free_at_once_and_nothing_is_written_to_them(
    pair: SessionPair, end: Callable[[SessionPair], None]
) -> None:
    ask(pair)
    before = contents(pair.caches[1], list(MINE))
    end(pair)
    assert pair.of("D", FreeBlocks) == [FreeBlocks("r", MINE)]
    assert pair.decode.metrics()["quarantined_blocks"] == 0
    SilentPeers.silent.clear()
    pair.settle(1.0)
    assert torch.equal(contents(pair.caches[1], list(MINE)), before)
    assert not pair.decode._meetings
    assert pair.decode.metrics()["transport"].get("reads", 0) == 0


def test_a_peer_that_comes_in_a_new_generation_is_connected_in_that_one_only(pair: SessionPair) -> None:
    ask(pair)
    client_gone(pair)
    pair.prefill.sleep()
    pair.prefill.wake()
    pair.decode.arrived("s", pair.offer("s", [6]), 16)
    pair.decode.allocated("s", run(9))
    pair.settle(1.0)
    assert SilentPeers.waiting == 1, "the older one is given up"
    SilentPeers.silent.clear()
    pair.settle()
    assert pair.of("D", Loaded) == [Loaded("s")]


def test_an_agent_that_is_rebuilt_forgets_whom_the_old_one_was_connecting_to(pair: SessionPair) -> None:
    ask(pair)
    pair.decode._rebuild("a test wants it")
    assert SilentPeers.waiting == 0
    SilentPeers.silent.clear()
    pair.settle()
    assert pair.of("D", Loaded) == [Loaded("r")]


def test_a_session_that_sleeps_gives_up_whom_it_was_connecting_to() -> None:
    SilentPeers.reset("P")
    pair = SessionPair(make_transport=SilentPeers, decode=ConsumerSettings())
    ask(pair)
    pair.decode.sleep("abort")
    assert SilentPeers.waiting == 0
    assert not pair.decode._meetings
    pair.close()
