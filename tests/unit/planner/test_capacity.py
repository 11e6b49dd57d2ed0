"""What fits, what waits, what moves, and what helps when nothing fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.kvcache.sizing import SizingConstants
from pdkv.planner.advice import Remedy
from pdkv.planner.capacity import MemoryBudget, blocks_within, capacity, waiting_share
from pdkv.planner.groups import CacheShape, cache_shape
from pdkv.planner.layers import PageFormat
from pdkv.planner.model_config import read_model
from pdkv.planner.plan import PlanRequest, make_plan
from pdkv.planner.presets import find_model, gpu_memory, gpu_names, parse_bytes
from pdkv.planner.transfer import engine_ratio, lease_pressure, link_need

pytestmark = pytest.mark.cpu

GIB = 1 << 30
MIB = 1 << 20


def shape_of(name: str, **form: int) -> CacheShape:
    return cache_shape(read_model(find_model(name).config, name), PageFormat(**form))


BUDGET = MemoryBudget(80 * GIB, 0.5, 20 * GIB, 2 * GIB, 1 * GIB, 1 * GIB)


class TestMemory:
    def test_a_fixed_cache_gets_the_share_less_all_that_is_not_kv(self) -> None:
        assert BUDGET.fixed_cache_bytes() == 40 * GIB - 24 * GIB

    def test_a_growable_cache_gets_what_a_measurement_after_warmup_would_leave(self) -> None:
        whole = MemoryBudget(80 * GIB, 1.0, 20 * GIB, 2 * GIB, 1 * GIB, 1 * GIB)
        constants = SizingConstants(margin_floor_bytes=GIB, margin_fraction=0.75)
        assert whole.growable_cache_bytes(constants) == 80 * GIB - 22 * GIB - 2 * GIB - int(1.5 * GIB)

    def test_at_the_same_share_the_two_agree_where_the_margin_does_not_bind(self) -> None:
        assert BUDGET.growable_cache_bytes(SizingConstants()) == BUDGET.fixed_cache_bytes()


class TestBlocks:
    def test_without_granules_blocks_are_bytes_over_block_bytes(self) -> None:
        shape = shape_of("smollm2-135m", block_size=32)
        assert blocks_within(shape, 268_435_456, 0, 0) == 268_435_456 // (30 * 32 * 3 * 256) == 364

    def test_with_granules_each_layers_segment_is_rounded_up(self) -> None:
        shape = shape_of("smollm2-135m", block_size=32)
        # 128 granules of 2 MiB over 30 segments: four each, 8 MiB a layer, 24 KiB a block
        assert blocks_within(shape, 268_435_456, 2 * MIB, 0) == 8 * MIB // (24 * 1024) == 341

    @given(st.integers(0, 1 << 36), st.sampled_from([64 * 1024, 2 * MIB, 512 * MIB]))
    def test_the_count_is_the_largest_that_fits(self, nbytes: int, granule: int) -> None:
        shape = shape_of("smollm2-135m")
        strides = shape.segment_strides(0)

        def physical(blocks: int) -> int:
            return sum(-(-blocks * stride // granule) * granule for stride in strides)

        blocks = blocks_within(shape, nbytes, granule, 0)
        assert physical(blocks) <= nbytes
        assert physical(blocks + 1) > nbytes or (blocks + 1) * sum(strides) > nbytes

    def test_block_0_and_the_watermark_are_not_for_requests(self) -> None:
        shape = shape_of("llama-3.1-8b")
        pool = capacity(shape, 1001 * shape.block_bytes(), 1600, watermark=0.01)
        assert (pool.blocks, pool.watermark_blocks, pool.tokens) == (1001, 10, 16_000)
        assert (pool.blocks_per_request, pool.max_requests) == (100, 9)

    def test_a_request_that_just_fits_needs_the_null_block_beside_it(self) -> None:
        shape = shape_of("llama-3.1-8b")
        assert capacity(shape, 101 * shape.block_bytes(), 1600).fits_one
        assert not capacity(shape, 100 * shape.block_bytes(), 1600).fits_one

    def test_all_stages_take_the_count_of_the_one_with_the_least_room(self) -> None:
        model = read_model(find_model("deepseek-v3").config)
        shape = cache_shape(model, PageFormat(), pipeline_parallel=4)
        pool = capacity(shape, 10 * GIB, 1000)
        assert pool.blocks == 10 * GIB // (16 * 16 * 1152)

    @pytest.mark.parametrize(("context", "watermark"), [(0, 0.0), (10, 1.0), (10, -0.1)])
    def test_wrong_settings_are_refused(self, context: int, watermark: float) -> None:
        with pytest.raises(ConfigError):
            capacity(shape_of("llama-3.1-8b"), GIB, context, watermark=watermark)


class TestTraffic:
    def test_the_link_must_move_a_request_in_what_queue_and_prefill_leave(self) -> None:
        need = link_need(
            2 * 10**9,
            prompt_tokens=8000,
            ttft_s=1.0,
            prefill_tokens_per_s=20_000,
            queue_s=0.1,
            arrivals_per_s=3,
            link_bytes_per_s=5e9,
        )
        assert need.transfer_budget_s == pytest.approx(0.5)
        assert need.bytes_per_s == pytest.approx(4e9)
        assert need.sustained_bytes_per_s == 6e9
        assert (need.transfer_s, need.meets_target) == (pytest.approx(0.4), True)

    def test_no_link_is_fast_enough_where_prefill_alone_takes_longer(self) -> None:
        need = link_need(1, prompt_tokens=8000, ttft_s=0.1, prefill_tokens_per_s=20_000, link_bytes_per_s=1e12)
        assert (need.bytes_per_s, need.meets_target) == (None, False)

    def test_leases_follow_littles_law_and_renew_every_five_seconds(self) -> None:
        pressure = lease_pressure(4.0, queue_s=11.0, transfer_s=1.0, prompt_blocks=100)
        assert (pressure.leases, pressure.blocks, pressure.renewals_per_s) == (48.0, 4800, 8.0)
        assert not pressure.expires_unrenewed
        assert lease_pressure(4.0, queue_s=31.0, transfer_s=0.0, prompt_blocks=1).expires_unrenewed

    def test_requests_that_wait_for_kv_hold_blocks_up_to_the_watermark(self) -> None:
        shape = shape_of("llama-3.1-8b")
        pool = capacity(shape, 1001 * shape.block_bytes(), 1600)
        share = waiting_share(pool, arrivals_per_s=2.0, transfer_s=0.5, prompt_blocks=90)
        assert (share.expected_blocks, share.most_blocks) == (90, 990)
        assert (share.expected_share, share.running_requests) == (0.09, 9)
        assert waiting_share(pool, 1000.0, 10.0, 90).running_requests == 0

    def test_the_ratio_takes_the_larger_need_of_d(self) -> None:
        ratio = engine_ratio(
            arrivals_per_s=10,
            prompt_tokens=4000,
            output_tokens=200,
            prefill_tokens_per_s=20_000,
            decode_tokens_per_s=2000,
            max_requests=25,
            time_per_token_s=0.05,
        )
        assert (ratio.prefill_engines, ratio.decode_engines_by_rate) == (2.0, 1.0)
        assert (ratio.decode_engines_by_memory, ratio.prefill_per_decode) == (4.0, 0.5)

    def test_rates_of_nothing_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="above 0"):
            link_need(1, prompt_tokens=1, ttft_s=1, prefill_tokens_per_s=0)
        with pytest.raises(ConfigError, match="above 0"):
            link_need(1, prompt_tokens=1, ttft_s=1, prefill_tokens_per_s=1, link_bytes_per_s=0)
        with pytest.raises(ConfigError, match="above 0"):
            engine_ratio(
                arrivals_per_s=0,
                prompt_tokens=1,
                output_tokens=1,
                prefill_tokens_per_s=1,
                decode_tokens_per_s=1,
                max_requests=1,
            )


class TestRemedies:
    def remedies(self, **settings: object) -> dict[str, Remedy]:
        request = PlanRequest(gpu="h100-80g", context=1_000_000, **settings)  # type: ignore[arg-type]
        return {remedy.what: remedy for remedy in make_plan(request).remedies}

    def test_a_context_that_fits_needs_none(self) -> None:
        assert make_plan(PlanRequest(model="llama-3.1-8b", gpu="h200", context=100_000)).remedies == ()

    def test_a_million_tokens_of_llama_70b_fit_with_more_ranks_or_a_host(self) -> None:
        found = self.remedies(model="llama-3.1-70b", tensor_parallel=2)
        assert not found["--kv-cache-dtype fp8"].fits
        assert found["--kv-cache-dtype fp8"].bytes_per_rank == 1_000_000 * 163_840 // 2
        assert found["--tp 8"].fits
        assert "--tp 16" not in found
        assert found["a model with MLA"].bytes_per_rank == 1_000_000 * 80 * 1152

    def test_the_host_holds_what_the_devices_do_not(self) -> None:
        request = PlanRequest(model="llama-3.1-70b", gpu="h100-80g", tensor_parallel=2, context=1_000_000)
        plan = make_plan(request)
        host = next(remedy for remedy in plan.remedies if remedy.what == "a host tier")
        on_devices = 2 * plan.pool.block_bytes * (plan.pool.blocks - 1)
        assert host.host_bytes == pytest.approx(plan.bytes_per_request - on_devices, abs=2 * 64 * MIB)

    def test_more_ranks_do_not_divide_a_latent(self) -> None:
        found = self.remedies(model="deepseek-v3", tensor_parallel=16)
        assert found["--tp 32"].bytes_per_rank == 1_000_000 * 70_272
        assert found["--kv-cache-dtype fp8"].bytes_per_rank == 1_000_000 * 35_136
        assert "--kv-cache-dtype nvfp4" not in found


class TestNames:
    def test_a_gpu_is_a_preset_or_a_size(self) -> None:
        assert gpu_memory("H200") == 150_109_880_320
        assert gpu_memory("141GiB") == 141 * GIB
        assert all(gpu_memory(name) > 40 * GIB for name in gpu_names())
        with pytest.raises(ConfigError, match="presets are h100-80g"):
            gpu_memory("h900")

    @pytest.mark.parametrize(
        ("text", "nbytes"), [("1.5GiB", 3 * GIB // 2), ("80GB", 80 * 10**9), ("4096", 4096), ("512 mib", 512 * MIB)]
    )
    def test_sizes_have_binary_and_decimal_units(self, text: str, nbytes: int) -> None:
        assert parse_bytes(text) == nbytes

    @pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "10 parsecs"])
    def test_what_is_no_size_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="not a size"):
            parse_bytes(text)
