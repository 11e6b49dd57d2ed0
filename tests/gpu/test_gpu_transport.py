"""The nixl transport over CUDA virtual memory, between two processes on one device.

With the UCX of NIXL's wheel such memory moves by software emulation (see the probe's report); what is held here is that
it arrives right, and that the probe says how.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pdkv
from pdkv.testing import TRANSPORT_CHECKS, TransportBench, run_transport_check
from pdkv.transfer.messages import EngineRef

pytest.importorskip("nixl", reason="NIXL is not installed", exc_type=ImportError)

pytestmark = pytest.mark.gpu

FACTORY = "pdkv_connectors.nixl.transport:NixlTransport"
#: Where it matters who hashes, and when.
WITH_SUMS = (
    "moves_exactly_the_named_blocks",
    "moves_layers_of_the_named_group_only",
    "moves_between_layouts_of_the_same_pages",
    "runs_several_transfers_at_once",
    "fails_what_differs_from_its_sums_and_counts_it",
    "does_not_take_new_contents_for_damage",
    "unregister_is_a_fence",
    "close_ends_everything",
)


@pytest.fixture(scope="module")
def bench() -> Iterator[TransportBench]:
    with TransportBench(FACTORY, processes=2, driver="cuda", environment={"NIXL_LOG_LEVEL": "FATAL"}) as bench:
        yield bench


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_nixl_keeps_to_the_rule(bench: TransportBench, rule: str) -> None:
    run_transport_check(rule, bench)


@pytest.fixture(scope="module")
def verified_bench() -> Iterator[TransportBench]:
    folder = str(Path(__file__).parents[1] / "integration")
    paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    environment = {"NIXL_LOG_LEVEL": "FATAL", "PYTHONPATH": paths}
    with TransportBench("verified:nixl", processes=2, driver="cuda", environment=environment) as bench:
        yield bench


@pytest.mark.parametrize("rule", WITH_SUMS)
def test_nixl_with_sums_by_the_kernel_keeps_to_the_rule(verified_bench: TransportBench, rule: str) -> None:
    run_transport_check(rule, verified_bench)


def test_the_probe_reads_right_and_names_what_ucx_used(record: Callable[..., Any]) -> None:
    from pdkv_connectors.nixl.settings import NixlSettings
    from pdkv_connectors.nixl.transport import NixlTransport

    spec = pdkv.AttentionSpec(num_kv_heads=8, block_size=16, head_size=128, dtype="bfloat16")
    config = pdkv.KVCacheConfig.uniform([f"layer.{index}" for index in range(4)], spec, num_blocks=1024)
    with pdkv.GrowableKVCache(config, pdkv.open_driver("cuda")) as cache:
        cache.commit(256)
        cache.commit(1024)
        owner = NixlTransport(NixlSettings(probe="always"))
        owner.register(cache, EngineRef("P", 1))
        assert owner.probed is not None
        assert owner.probed.edges == 16
        assert owner.probed.transport != "unknown"
        record("nixl_probe", gb_per_s=owner.probed.gb_per_s, transport=owner.probed.transport)
        owner.close()
