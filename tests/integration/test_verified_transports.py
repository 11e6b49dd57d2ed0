"""Sums over real NIXL and real UCX, between processes: what is damaged on the way is not taken, and all else is."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transport_bench import between_processes

from pdkv.errors import PdkvError, TransportError
from pdkv.testing import TRANSPORT_CHECKS, TransportBench, run_transport_check
from pdkv.testing.child import Child
from pdkv.testing.transports.bench import SCATTERED
from pdkv_connectors.checking.transfer import ANSWER_TIMEOUT_S

pytest.importorskip("nixl", reason="NIXL is not installed; make test installs it")
if importlib.util.find_spec("ucxx") is None:  # importing it here would change UCX's settings for all other tests
    pytest.skip("ucxx is not installed; make test installs it", allow_module_level=True)

pytestmark = pytest.mark.nixl

QUIET = {
    "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_WARN_UNUSED_ENV_VARS": "n",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))),
}  # fmt: skip
WAYS = pytest.mark.parametrize("reads", [True, False], ids=["pull", "push"])
NAMES = pytest.mark.parametrize("name", ["nixl", "ucx"])

nixl_bench = between_processes("verified:nixl", QUIET)
nixl_tcp_bench = between_processes("verified:nixl", {**QUIET, "UCX_TLS": "tcp"})
ucx_bench = between_processes("verified:ucx", QUIET)


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_nixl_with_sums_keeps_to_the_rule(nixl_bench: TransportBench, rule: str) -> None:
    run_transport_check(rule, nixl_bench)


@pytest.mark.parametrize(
    "rule", ["fails_what_differs_from_its_sums_and_counts_it", "does_not_take_new_contents_for_damage"]
)
def test_nixl_over_tcp_with_sums_keeps_to_the_rule(nixl_tcp_bench: TransportBench, rule: str) -> None:
    run_transport_check(rule, nixl_tcp_bench)


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_ucx_with_sums_keeps_to_the_rule(ucx_bench: TransportBench, rule: str) -> None:
    run_transport_check(rule, ucx_bench)


Met = Callable[[str], TransportBench]


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, TransportBench]]:
    """Two processes for each factory, which take seconds to start."""
    started: dict[str, TransportBench] = {}
    yield started
    for bench in started.values():
        bench.__exit__(None, None, None)


@pytest.fixture
def met(benches: dict[str, TransportBench]) -> Iterator[Met]:
    """Gives both sides of a bench a transport of that factory, over caches with different numbers of blocks."""
    opened = []

    def make(factory: str) -> TransportBench:
        if factory not in benches:
            benches[factory] = TransportBench(factory, processes=2, environment=QUIET)
        bench = benches[factory]
        opened.append(bench)
        bench.open()
        bench.build(bench.p, 1, capacity=90, commits=(10, 40, 80))
        bench.build(bench.d, 2, capacity=50, commits=(44,))
        for side, name in ((bench.p, "P"), (bench.d, "D")):
            side.ask("register", engine=name, generation=1)
        return bench

    yield make
    for bench in opened:
        bench.finish()


@WAYS
@pytest.mark.parametrize("factory", ["DamagingNixl", "DamagingUcx"])
def test_a_bit_that_changes_on_the_way_fails_this_transfer_and_is_counted(met: Met, factory: str, reads: bool) -> None:
    bench = met(f"verified:{factory}")
    bench.introduce()
    bench.p.ask("offer", blocks=[source for _, source, _ in SCATTERED[:5]])
    side = bench.d if reads else bench.p
    number = bench.post(SCATTERED, reads=reads)
    assert bench.ended(number, reads=reads) == "failed"
    block = SCATTERED[-1][1]
    assert f"the bytes of block {block} are not those" in side.ask("reason", number=number)
    assert bench.d.ask("state")["checksum_failures"] == 1
    assert side.ask("state")["failed"] == 1
    assert "bytes" not in side.ask("state")


@NAMES
@WAYS
def test_runs_of_blocks_arrive_between_caches_of_different_sizes_and_across_generations(
    met: Met, name: str, reads: bool
) -> None:
    bench = met(f"verified:{name}")
    bench.introduce()
    pairs = [(0, 30 + index, 2 + index) for index in range(25)] + [(0, 79, 43), (0, 5, 40), (0, 6, 41)]
    bench.p.ask("offer", blocks=list(range(30, 40)))
    bench.move(pairs, reads=reads)
    bench.require_moved(pairs)
    bench.renew()
    bench.move(pairs, reads=reads, generation=2 if reads else 1)
    bench.require_moved(pairs, seed=3)
    for side in (bench.p, bench.d):
        state = side.ask("state")
        assert not {"checksum_failures", "rewritten", "failed"} & state.keys()


@NAMES
@WAYS
def test_who_posts_is_answered_by_a_peer_that_has_never_met_it(met: Met, name: str, reads: bool) -> None:
    """As between two sessions: only who posts transfers connects."""
    bench = met(f"verified:{name}")
    side, peer, told, of = (bench.d, bench.p, "P", "D") if reads else (bench.p, bench.d, "D", "P")
    side.ask("connect", engine=told, generation=1, metadata=peer.ask("describe"))
    bench.move(SCATTERED, reads=reads)
    bench.require_moved(SCATTERED)
    assert peer.ask("state")["peers"] == []
    peer.ask("connect", engine=of, generation=1, metadata=side.ask("describe"))
    bench.move(SCATTERED, reads=reads)
    peer.ask("disconnect", engine=of)
    bench.d.ask("fill", seed=2)
    bench.move(SCATTERED, reads=reads)
    bench.require_moved(SCATTERED)


@NAMES
@WAYS
def test_a_peer_without_sums_is_refused_where_it_is_to_be_verified(met: Met, name: str, reads: bool) -> None:
    """D is to verify and P keeps no sums: D does not read from it, and P does not write to D."""
    with_sums, without = met(f"verified:{name}"), met(f"pdkv_connectors.{name}.transport:{name.title()}Transport")
    if reads:
        with pytest.raises(TransportError, match="the peer keeps no sums, which this side is to verify"):
            with_sums.d.ask("connect", engine="P", generation=1, metadata=without.p.ask("describe"))
        return
    without.p.ask("connect", engine="D", generation=1, metadata=with_sums.d.ask("describe"))
    with pytest.raises(TransportError, match="the peer is to compare what it is sent, and no sums are kept here"):
        without.p.ask("post", engine="D", generation=1, pairs=[[0, 1, 1]], reads=False)
    assert with_sums.d.ask("differing", seed=2) == []


@NAMES
def test_an_owner_that_is_killed_before_it_answers_fails_the_transfer(name: str) -> None:
    with TransportBench(f"verified:{name}", processes=2, environment=QUIET) as bench:
        bench.open()
        bench.meet()
        bench.move(SCATTERED[:1])
        assert isinstance(bench.p, Child)
        bench.p.process.kill()
        bench.p.process.wait(30)
        begin = time.monotonic()
        try:
            state = bench.ended(bench.post(SCATTERED))
        except PdkvError:
            state = "failed"
        assert state == "failed"
        assert time.monotonic() - begin < ANSWER_TIMEOUT_S, "it is noticed before the answer's deadline"
        assert "checksum_failures" not in bench.d.ask("state")
