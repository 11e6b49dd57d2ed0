"""The ipc transport between processes, on the host: memory that returns, peers that die, bytes that are damaged."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ipc_peers import Peer, peers, until

from pdkv.testing import TRANSPORT_CHECKS, TransportBench, run_transport_check
from pdkv.testing.child import ChildError
from pdkv_connectors.ipc import IpcTransport

pytestmark = pytest.mark.cpu

ALL = [(block, 39 - block) for block in range(40)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Peer, Peer]]:
    """P and D, D connected to P."""
    with peers(tmp_path, "host") as (p, d):
        d.meet(p)
        yield p, d


@pytest.fixture(scope="module")
def bench() -> Iterator[TransportBench]:
    with TransportBench("pdkv_connectors.ipc:IpcTransport", processes=2) as bench:
        yield bench


@pytest.fixture(scope="module")
def bench_without_kernels() -> Iterator[TransportBench]:
    with TransportBench(lambda: IpcTransport(compiled=False)) as bench:
        yield bench


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_it_keeps_the_contract_without_kernels(rule: str, bench_without_kernels: TransportBench) -> None:
    run_transport_check(rule, bench_without_kernels)


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_it_keeps_the_contract_between_processes(rule: str, bench: TransportBench) -> None:
    run_transport_check(rule, bench)


def test_memory_returns_while_peers_live_because_they_are_told_to_drop_it(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    assert d.read(p, ALL) == "done"
    p.ask("unregister")
    released, given_back, pinned = p.ask("release_report")
    assert pinned == 0
    assert given_back == released > 0
    assert p.ask("state").get("drops_unacknowledged", 0) == 0
    p.ask("recommit")
    p.ask("fill", seed=3)
    p.ask("register", engine="P", generation=2)
    d.meet(p, generation=2)
    assert d.read(p, ALL, generation=2) == "done"
    assert d.ask("differing", seed=2, moved={str(to): [3, source] for source, to in ALL}) == []


def test_a_peer_that_does_not_answer_is_counted_and_named_as_pinning_the_memory(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    d.stop()
    try:
        p.ask("unregister")
        assert p.ask("state")["drops_unacknowledged"] == 1
        released, given_back, pinned = p.ask("release_report")
        assert pinned == released
        assert given_back == 0
    finally:
        d.process.send_signal(signal.SIGCONT)


def test_decode_outlives_a_prefill_that_is_killed(tmp_path: Path) -> None:
    with peers(tmp_path, "host", "PDQ") as (p, d, q):
        d.meet(p)
        assert d.read(p, ALL[:3]) == "done"
        p.kill()
        with pytest.raises(ChildError, match="StaleGenerationError"):
            until(lambda: d.read(p, ALL[3:5]), lambda _: False)
        d.meet(q)
        assert d.read(q, ALL) == "done"
        assert d.ask("differing", seed=2, moved={str(to): [3, source] for source, to in ALL}) == []


def test_memory_returns_when_a_decode_that_held_it_is_killed(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    assert p.ask("state")["holders"] == 1
    d.kill()
    assert until(lambda: p.ask("state")["holders"], lambda holders: holders == 0) == 0
    p.ask("unregister")
    released, given_back, _ = p.ask("release_report")
    assert given_back == released > 0


def test_blocks_that_were_offered_are_read_without_asking_their_owner(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.ask("offer", blocks=[4, 5, 6])
    assert d.read(p, [(4, 1), (5, 2)]) == "done"
    assert d.ask("state").get("offers_asked", 0) == 0
    assert d.read(p, [(6, 3), (7, 4)]) == "done"
    assert d.ask("state")["offers_asked"] == 1


@pytest.mark.parametrize(
    ("damage", "arguments"),
    [
        ("mark_quietly", {"layer": 2, "block": 5, "position": 77}),
        ("swap_words", {"layer": 0, "block": 5, "first": 8, "second": 900}),
        ("copy_piece", {"layer": 1, "source": 9, "block": 5, "begin": 4096, "nbytes": 512}),
    ],
)
def test_bytes_that_changed_since_they_were_summed_fail_the_request(
    pair: tuple[Peer, Peer], damage: str, arguments: dict[str, int]
) -> None:
    p, d = pair
    p.ask("offer", blocks=[4, 5, 6])
    p.ask(damage, **arguments)
    number = d.post(p, [(4, 1), (5, 2), (6, 3)])
    assert d.ask("wait", number=number, within_s=30.0) == "failed"
    assert "block 5" in d.ask("reason", number=number)
    assert d.ask("state")["checksum_failures"] == 1
    assert d.read(p, [(4, 1), (6, 3)]) == "done"
    p.ask("offer", blocks=[5])
    assert d.read(p, [(5, 2)]) == "done"


def test_a_block_that_was_offered_keeps_its_sums_when_others_are_asked_for_with_it(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.ask("offer", blocks=[5])
    p.ask("mark_quietly", layer=2, block=5, position=77)
    number = d.post(p, [(4, 1), (5, 2)])
    assert d.ask("wait", number=number, within_s=30.0) == "failed"
    assert d.ask("state")["offers_asked"] == 1
    assert "block 5" in d.ask("reason", number=number)


def test_without_sums_everything_is_taken_as_it_is(tmp_path: Path) -> None:
    with peers(tmp_path, "host", verify=False) as (p, d):
        d.meet(p)
        p.ask("offer", blocks=[5])
        p.ask("mark", block=5, value=9)
        assert d.read(p, [(5, 2)]) == "done"
        assert d.ask("is_marked", block=2, value=9)


def test_memory_that_cannot_be_mapped_here_is_a_refusal_that_lets_another_transport_be_tried(
    pair: tuple[Peer, Peer],
) -> None:
    p, d = pair
    d.ask("disconnect", engine="P")
    d.ask("refuse_imports")
    with pytest.raises(
        ChildError, match=r"memory of engine 'P' cannot be mapped here: .* use another transport"
    ) as refused:
        d.meet(p)
    assert refused.value.kind == "TransportError"
