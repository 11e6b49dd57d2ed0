"""The nixl transport over real agents: the contract between two processes, and what is NIXL's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from transport_bench import between_processes

import pdkv
from pdkv.errors import TransportError
from pdkv.testing import TRANSPORT_CHECKS, TransportBench, run_transport_check
from pdkv.testing.transports.bench import SCATTERED
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.transport import Transfer, TransferState

pytest.importorskip("nixl", reason="NIXL is not installed; make test installs it")

from pdkv_connectors.nixl.probe_extents import probe_extents
from pdkv_connectors.nixl.settings import NixlSettings
from pdkv_connectors.nixl.transport import NixlTransport

pytestmark = pytest.mark.nixl

FACTORY = "pdkv_connectors.nixl.transport:NixlTransport"
QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
#: Where it matters that tcp, unlike the default, needs the owner's help and can kill it.
OVER_TCP = (
    "moves_exactly_the_named_blocks",
    "unregister_is_a_fence",
    "serves_again_in_a_new_generation",
    "an_abandoned_transfer_that_has_ended_writes_no_more",
    "close_ends_everything",
)
P, D = EngineRef("P", 1), EngineRef("D", 1)

bench = between_processes(FACTORY, QUIET)
tcp_bench = between_processes(FACTORY, {**QUIET, "UCX_TLS": "tcp"})


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_nixl_keeps_to_the_rule(bench: TransportBench, rule: str) -> None:
    run_transport_check(rule, bench)


@pytest.mark.parametrize("rule", OVER_TCP)
def test_nixl_over_tcp_keeps_to_the_rule(tcp_bench: TransportBench, rule: str) -> None:
    run_transport_check(rule, tcp_bench)


def test_after_an_error_the_peer_is_added_again_and_serves(bench: TransportBench) -> None:
    """The error that an owner brings about who forgets to unregister before it lets go of its memory."""
    bench.open()
    bench.meet()
    bench.p.ask("release")
    with pytest.raises(TransportError, match="NIXL could not post"):
        bench.ended(bench.post(SCATTERED))
    bench.p.ask("recommit")
    bench.p.ask("fill", seed=1)
    bench.d.ask("fill", seed=2)
    bench.move(SCATTERED)
    bench.require_moved(SCATTERED)
    assert bench.d.ask("state")["renewed_peers"] == 1
    bench.finish()


Cache = Callable[..., pdkv.GrowableKVCache]


@pytest.fixture
def cache() -> Iterator[Cache]:
    """Makes caches of four layers and pages of 32 KiB, one chunk a segment for each count of blocks."""
    made = []

    def make(*commits: int) -> pdkv.GrowableKVCache:
        spec = pdkv.AttentionSpec(num_kv_heads=8, block_size=8, head_size=64, dtype="float32")
        config = pdkv.KVCacheConfig.uniform([f"layer.{index}" for index in range(4)], spec, num_blocks=256)
        made.append(pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=1 << 16)))
        for blocks in commits:
            made[-1].commit(blocks)
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def pair(cache: Cache) -> Iterator[tuple[NixlTransport, NixlTransport]]:
    """P and D in this process, D knows P; P's blocks hold their own numbers."""
    p, d = NixlTransport(), NixlTransport()
    p.register(cache(64, 128), P)
    d.register(cache(128), D)
    d.connect(P, p.describe())
    assert p.cache is not None
    for view in p.cache.committed_views().values():
        for block in range(128):
            view[block].fill_(block)
    yield p, d
    d.close()
    p.close()


def ended(transfer: Transfer, owner: NixlTransport) -> TransferState:
    """How a transfer ends while its peer, in this thread, is given its part: connecting takes both."""
    deadline = time.monotonic() + 30
    while transfer.poll() is TransferState.RUNNING:
        owner.progress()
        assert time.monotonic() < deadline
    return transfer.poll()


def test_each_extent_is_a_registration_of_its_own(pair: tuple[NixlTransport, NixlTransport]) -> None:
    p, _ = pair
    assert p.cache is not None
    registered = p._registered
    ranges = {tuple(registered[index][:2]) for index in range(registered.descCount())}
    assert ranges == {(extent.address, extent.nbytes) for extent in p.cache.extents()}
    assert len(ranges) == 8


def test_neighbours_are_one_descriptor_a_layer_and_cut_at_extents(pair: tuple[NixlTransport, NixlTransport]) -> None:
    p, d = pair
    assert ended(d.read(P, [BlockPair(0, b, b + 50) for b in range(10, 40)]), p) is TransferState.DONE
    assert d.counts["descriptors"] == 4
    assert ended(d.read(P, [BlockPair(0, b, b - 50) for b in range(50, 80)]), p) is TransferState.DONE
    assert d.counts["descriptors"] == 4 + 8, "P's extents meet at block 64"
    assert d.cache is not None
    for view in d.cache.committed_views().values():
        assert torch.equal(view[60:90, 0, 0, 0], torch.arange(10.0, 40.0))
        assert torch.equal(view[0:30, 0, 0, 0], torch.arange(50.0, 80.0))


def test_a_peer_that_has_gone_is_added_again_once_and_then_refused(pair: tuple[NixlTransport, NixlTransport]) -> None:
    p, d = pair
    assert ended(d.read(P, [BlockPair(0, 1, 1)]), p) is TransferState.DONE
    p.unregister()

    def outcome() -> str:
        try:
            return str(ended(d.read(P, [BlockPair(0, 1, 1)]), p))
        except TransportError as error:
            return str(error)

    outcomes = [outcome() for _ in range(3)]
    assert "done" not in outcomes
    assert "also after its agent was added again" in outcomes[2]
    assert d.counts["renewed_peers"] == 1


def test_a_transfer_with_another_peer_is_not_disturbed(pair: tuple[NixlTransport, NixlTransport], cache: Cache) -> None:
    p, d = pair
    other = NixlTransport()
    other.register(cache(128), EngineRef("Q", 1))
    d.connect(EngineRef("Q", 1), other.describe())
    p.unregister()
    with suppress(TransportError):
        ended(d.read(P, [BlockPair(0, 1, 1)]), p)
    assert ended(d.read(EngineRef("Q", 1), [BlockPair(0, 1, 1)]), other) is TransferState.DONE
    d.disconnect("Q")
    other.close()


def test_the_probe_compares_every_edge_and_names_what_ucx_used(cache: Cache) -> None:
    owner = NixlTransport(NixlSettings(probe="always", min_probe_gbps=1e6))
    probed = cache(64, 128)
    owner.register(probed, P)
    state = owner.describe_state()
    assert owner.probed is not None
    assert owner.probed.edges == 16
    assert state["ucx_transport"] not in (None, "unknown")
    assert state["slow_probes"] == 1, "an impossible bandwidth was asked for, and missing it is a warning"
    assert not any(view.any() for view in probed.committed_views().values()), "the noise is gone"
    owner.close()


def test_I13_a_peer_that_reads_other_bytes_is_an_error(pair: tuple[NixlTransport, NixlTransport], cache: Cache) -> None:
    """What cuda_ipc does with a registration over several chunks: DONE, and other bytes."""
    p, _ = pair
    elsewhere = cache(64, 128)

    class ShowsOtherMemory:
        def __getattr__(self, name: str) -> object:
            return getattr(elsewhere if name == "raw_tensor" else p.cache, name)

    with pytest.raises(TransportError, match=r"other bytes than the KV cache holds, at 16 of 16 edges"):
        probe_extents(p.agent, ShowsOtherMemory(), "DRAM", timeout_s=60)  # type: ignore[arg-type]


def test_I13_a_probe_that_is_too_slow_may_be_an_error_and_leaves_nothing_registered(cache: Cache) -> None:
    owner = NixlTransport(NixlSettings(probe="always", min_probe_gbps=1e6, on_slow="fail"))
    with pytest.raises(TransportError, match=r"reads only .* GB/s from the KV cache by"):
        owner.register(cache(8), P)
    assert owner.describe_state()["registered"] is False
    owner.close()
