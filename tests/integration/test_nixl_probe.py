"""The bandwidth probe, with a real NIXL agent and its real reader process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import pdkv
from pdkv.errors import ConnectorError

pytest.importorskip("nixl", reason="NIXL is not installed; make test installs it")

from pdkv_connectors.nixl.probe import PROBE_NBYTES, measure_read

pytestmark = pytest.mark.nixl


@pytest.fixture
def owner():  # type: ignore[no-untyped-def]
    """A real agent that registered the extents of a cache of 64 MiB, and the cache."""
    from nixl._api import nixl_agent, nixl_agent_config

    spec = pdkv.AttentionSpec(num_kv_heads=4, block_size=16, head_size=128, dtype="float32")
    config = pdkv.KVCacheConfig.uniform(["a", "b"], spec, num_blocks=2048)
    with pdkv.GrowableKVCache(config, pdkv.open_driver("host")) as cache:
        cache.commit(1024, defragment=True)
        agent = nixl_agent("probed", nixl_agent_config(enable_prog_thread=False))
        extents = [(extent.address, extent.nbytes, 0, "") for extent in cache.extents()]
        descriptors = agent.get_reg_descs(extents, "DRAM")
        agent.register_memory(descriptors)
        yield agent, cache
        agent.deregister_memory(descriptors)


def test_a_registered_extent_is_read_by_another_process_and_timed(owner) -> None:  # type: ignore[no-untyped-def]
    agent, cache = owner
    extent = cache.extents()[1]
    report = measure_read(agent, extent.address, extent.nbytes, memory="DRAM", device_id=0)
    assert report.nbytes == min(PROBE_NBYTES, extent.nbytes)
    assert report.seconds > 0


def test_a_range_that_is_not_registered_gives_one_sentence(owner) -> None:  # type: ignore[no-untyped-def]
    agent, cache = owner
    outside = cache.address + cache.bytes_reserved - 4096
    with pytest.raises(ConnectorError, match="probe failed"):
        measure_read(agent, outside, 4096, memory="DRAM", device_id=0)


def test_a_reader_that_never_answers_is_ended_at_the_deadline(  # type: ignore[no-untyped-def]
    owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, cache = owner
    extent = cache.extents()[0]
    silent = tmp_path / "silent"
    silent.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    with pytest.raises(ConnectorError, match="within 1 s"):
        measure_read(agent, extent.address, extent.nbytes, memory="DRAM", device_id=0, timeout_s=1)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
