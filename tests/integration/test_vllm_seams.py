"""The start-up check of vLLM's private API, against the vLLM that is installed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed; make test installs it")

from pdkv.errors import ExtentError, SeamError  # noqa: E402
from pdkv_connectors.vllm import accounting, compat, measure, patches, warmup  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("seam", compat.ENGINE_SEAMS + compat.CONNECTOR_SEAMS, ids=lambda seam: seam.path)
def test_each_seam_is_where_it_is_expected(seam: compat.Seam) -> None:
    compat.check_seam(seam, vllm.__version__)


@pytest.mark.parametrize("seam", compat.ENGINE_SEAMS + compat.CONNECTOR_SEAMS, ids=lambda seam: seam.path)
def test_a_seam_that_is_gone_is_named_with_the_version(seam: compat.Seam) -> None:
    with pytest.raises(SeamError, match=rf"vLLM 9\.9.*{seam.purpose}.*is gone"):
        compat.check_seam(replace(seam, path=seam.path + "_moved"), "9.9")


def test_a_seam_that_lost_a_parameter_is_named() -> None:
    seam = replace(compat.ENGINE_SEAMS[0], parameters=("vllm_config", "flux"))
    with pytest.raises(SeamError, match="no longer takes flux"):
        compat.check_seam(seam, "9.9")


@pytest.mark.parametrize(("version", "platform"), [("0.31.2", "cpu"), ("0.34.0", "cpu"), ("0.32.0", "rocm")])
def test_an_unknown_version_or_platform_is_refused_and_the_known_ones_named(version: str, platform: str) -> None:
    with pytest.raises(SeamError, match=r"0\.32 on cpu"):
        compat.check_version(version, platform)


def test_a_vllm_with_a_growable_cache_of_its_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    compat.check_no_growth_of_its_own()
    monkeypatch.setattr(Worker, "extend_kv_cache", lambda self: None, raising=False)
    with pytest.raises(SeamError, match="growable KV cache of its own"):
        compat.check_no_growth_of_its_own()


def test_wrapping_the_engine_core_twice_wraps_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core import EngineCore

    monkeypatch.setattr(EngineCore, "_initialize_kv_caches", EngineCore._initialize_kv_caches)
    patches.install()
    once = EngineCore._initialize_kv_caches
    patches.install()
    assert EngineCore._initialize_kv_caches is once
    assert patches.installed()


def test_the_quiet_agent_is_restored_when_the_constructor_raises() -> None:
    import os

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    stock, affinity = base_worker.nixl_agent_config, os.sched_getaffinity(0)

    def constructor_that_raises() -> None:
        with patches.quiet_nixl_agent():
            os.sched_setaffinity(0, {max(affinity)})
            quiet = base_worker.nixl_agent_config()
            assert (quiet.enable_pthread, quiet.sync_mode.name) == (False, "NIXL_THREAD_SYNC_STRICT")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        constructor_that_raises()
    assert base_worker.nixl_agent_config is stock
    assert os.sched_getaffinity(0) == affinity


def test_warmup_stays_inside_the_committed_blocks_and_off_block_0() -> None:
    for num_blocks in range(2, 40):
        requests = warmup.plan_requests(num_blocks, 16, 256, 100, 8)
        used = [block for request in requests for block in request.block_ids]
        assert len(set(used)) == len(used)
        assert min(used) >= 1
        assert max(used) < num_blocks
        assert all(request.num_tokens + 1 <= 16 * len(request.block_ids) for request in requests)
        assert sum(request.num_tokens for request in requests) <= 256


def test_blocks_for_a_full_batch_hold_a_full_batch() -> None:
    for max_num_batched_tokens, max_model_len, block_size in [(512, 512, 32), (4096, 1024, 16), (100, 4096, 16)]:
        count = warmup.blocks_for_full_batch(max_num_batched_tokens, max_model_len, block_size)
        requests = warmup.plan_requests(count, block_size, max_num_batched_tokens, max_model_len, 256)
        assert sum(request.num_tokens for request in requests) == max_num_batched_tokens


class TestAccounts:
    """What counts as a remote hit, and what as computed again."""

    def account(self, **events: Any) -> accounting.TransferCounts:
        accounts = accounting.TransferAccounts()
        accounts.remote_prefill("r", 100)
        accounts.loading("r", events.get("loaded", 100))
        if events.get("arrived", True):
            accounts.arrived("r")
        if events.get("failed"):
            accounts.failed("r")
        for start, num_tokens in events.get("steps", [(99, 1), (100, 1)]):
            accounts.computed("r", start, num_tokens)
        accounts.ended("r")
        return accounts.counts

    def test_a_request_that_computes_only_the_last_prompt_token_is_a_hit(self) -> None:
        counts = self.account()
        assert (counts.remote_prefill_hits, counts.recomputed_tokens, counts.requests) == (1, 0, 1)

    def test_prompt_tokens_computed_here_are_counted_less_the_last_one(self) -> None:
        assert self.account(steps=[(0, 60), (60, 40), (100, 1)]).recomputed_tokens == 99

    def test_output_tokens_are_never_recomputed_tokens(self) -> None:
        assert self.account(steps=[(99, 1)] + [(100 + step, 1) for step in range(50)]).recomputed_tokens == 0

    def test_a_failed_load_is_no_hit(self) -> None:
        counts = self.account(failed=True)
        assert (counts.remote_prefill_hits, counts.failed_loads) == (0, 1)

    def test_a_load_that_never_arrived_is_no_hit(self) -> None:
        assert self.account(arrived=False).remote_prefill_hits == 0

    def test_a_request_without_a_remote_prompt_is_no_hit(self) -> None:
        accounts = accounting.TransferAccounts()
        accounts.computed("x", 0, 10)
        accounts.ended("x")
        assert (accounts.counts.requests, accounts.counts.remote_prefill_hits) == (1, 0)


def test_what_others_on_the_machine_use_does_not_count_as_this_engines() -> None:
    from pdkv.memory import MemoryInfo

    process = measure.ProcessMemory(private=1000, resident=1500, peak=1800)
    quiet = measure.host_reading(process, MemoryInfo(free=9000, total=10000), 500, 4000)
    busy = measure.host_reading(process, MemoryInfo(free=5000, total=10000), 500, 4000)
    for reading in (quiet, busy):
        assert reading.init_free_memory - reading.free_memory - 500 == 1000
        assert reading.transient_peak_bytes == 300


def test_I5_I6_the_guarded_agent_refuses_before_nixl_sees_the_range() -> None:
    from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

    import pdkv
    from pdkv_connectors.vllm.guard import GuardedAgent

    spec = pdkv.AttentionSpec(num_kv_heads=1, block_size=16, head_size=64, dtype="float32")
    config = pdkv.KVCacheConfig.uniform(["a", "b"], spec, num_blocks=64, layout=pdkv.KVCacheLayout.LBHNC)
    with pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=4096)) as cache:
        cache.commit(4)
        cache.commit(8)
        agent = GuardedAgent(NixlWrapper("guarded", nixl_agent_config(enable_prog_thread=False)), cache)
        first = cache.extents()[0]
        uncommitted = [(first.address, cache.config.tensors[0].size, 0, "")]
        with pytest.raises(ExtentError):
            agent.register_memory(agent.get_reg_descs(uncommitted, "DRAM"))
        assert agent.registered == []
        with pytest.raises(ExtentError):
            agent.register_memory(agent.get_reg_descs([(first.address, first.nbytes + 1, 0, "")], "DRAM"))
        whole = agent.get_reg_descs([(e.address, e.nbytes, 0, "") for e in cache.extents()], "DRAM")
        agent.register_memory(whole)
        assert len(agent.registered) == len(cache.extents()) > 2
        agent.deregister_memory(whole)
        assert agent.registered == []
