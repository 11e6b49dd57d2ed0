"""The nixl transport over CUDA virtual memory, between two processes on one device.

With the UCX of NIXL's wheel such memory moves by software emulation (see the probe's report); what is held here is that
it arrives right, and that the probe says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pdkv
from pdkv.testing import TRANSPORT_CHECKS, TransportBench, run_transport_check
from pdkv.transfer.messages import EngineRef

pytest.importorskip("nixl", reason="NIXL is not installed", exc_type=ImportError)

pytestmark = pytest.mark.gpu

FACTORY = "pdkv_connectors.nixl.transport:NixlTransport"


@pytest.fixture(scope="module")
def bench() -> Iterator[TransportBench]:
    with TransportBench(FACTORY, processes=2, driver="cuda", environment={"NIXL_LOG_LEVEL": "FATAL"}) as bench:
        yield bench


@pytest.mark.parametrize("rule", TRANSPORT_CHECKS)
def test_nixl_keeps_to_the_rule(bench: TransportBench, rule: str) -> None:
    run_transport_check(rule, bench)


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
        assert owner.verified is not None
        assert owner.verified.edges == 16
        assert owner.verified.transport != "unknown"
        record("nixl_probe", gb_per_s=owner.verified.gb_per_s, transport=owner.verified.transport)
        owner.close()
