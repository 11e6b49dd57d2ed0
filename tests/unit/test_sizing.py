"""Sizing: the formula, the cases after warmup, agreement over ranks, and the constants' sources."""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import CapacityError, ConfigError
from pdkv.kvcache.sizing import (
    MemoryReading,
    committable_blocks,
    decide_final_blocks,
    measure_kv_cache_bytes,
    require_room_for_one_request,
    resolve_utilization,
    transient_peak,
)
from pdkv.kvcache.sizing_constants import GIB, MIB, SizingConstants

pytestmark = pytest.mark.cpu

NO_MARGIN = SizingConstants(margin_floor_bytes=0, margin_fraction=0.0, warmup_reserve_fraction=0.0)


@dataclass
class TwoSegmentCache:
    """Arithmetic of a cache with two segments of 3 MiB a block and granules of 2 MiB; sizing needs no more of one."""

    capacity_blocks: int = 1000
    num_committed_blocks: int = 0

    @property
    def physical_bytes(self) -> int:
        return self.physical_bytes_for(self.num_committed_blocks)

    def physical_bytes_for(self, num_blocks: int, /) -> int:
        return 2 * (-(-num_blocks * 3 // 2) * 2) * MIB

    def blocks_within(self, nbytes: int, /) -> int:
        blocks = 0
        while blocks < self.capacity_blocks and self.physical_bytes_for(blocks + 1) <= nbytes:
            blocks += 1
        return blocks


def reading(free: int, *, requested: int = 80 * GIB, peak: int = 0, ipc: int = 0) -> MemoryReading:
    return MemoryReading(
        init_free_memory=80 * GIB,
        free_memory=free,
        requested_memory=requested,
        transient_peak_bytes=peak,
        multimodal_ipc_bytes=ipc,
    )


class TestFormula:
    def test_the_budget_binds_where_it_leaves_more_free_than_the_margin(self) -> None:
        nbytes = measure_kv_cache_bytes(
            init_free_memory=78 * GIB,
            free_memory=50 * GIB,
            committed_bytes=8 * GIB,
            requested_memory=40 * GIB,
            transient_peak_bytes=2 * GIB,
            margin_floor_bytes=1 * GIB,
            margin_fraction=0.75,
        )
        assert nbytes == 40 * GIB - 20 * GIB - 2 * GIB

    def test_the_margin_binds_where_the_budget_is_the_whole_device(self) -> None:
        nbytes = measure_kv_cache_bytes(
            init_free_memory=78 * GIB,
            free_memory=50 * GIB,
            committed_bytes=8 * GIB,
            requested_memory=80 * GIB,
            transient_peak_bytes=2 * GIB,
            margin_floor_bytes=1 * GIB,
            margin_fraction=0.75,
        )
        assert nbytes == 58 * GIB - int(1.5 * GIB) - 2 * GIB

    def test_the_floor_holds_where_the_peak_is_small(self) -> None:
        nbytes = measure_kv_cache_bytes(
            init_free_memory=GIB * 10,
            free_memory=GIB * 10,
            committed_bytes=0,
            requested_memory=GIB * 10,
            transient_peak_bytes=100 * MIB,
            margin_floor_bytes=256 * MIB,
            margin_fraction=0.02,
        )
        assert nbytes == 10 * GIB - 256 * MIB - 100 * MIB

    def test_it_never_goes_below_zero(self) -> None:
        nbytes = measure_kv_cache_bytes(
            init_free_memory=10 * GIB, free_memory=0, committed_bytes=0, requested_memory=9 * GIB
        )
        assert nbytes == 0

    @given(
        st.integers(0, 1 << 40),
        st.integers(0, 1 << 40),
        st.integers(0, 1 << 40),
        st.integers(0, 1 << 40),
        st.booleans(),
    )
    def test_what_is_already_committed_does_not_change_the_answer(
        self, free: int, committed: int, requested: int, peak: int, half: bool
    ) -> None:
        moved = committed // 2 if half else committed

        def size(free_memory: int, committed_bytes: int) -> int:
            return measure_kv_cache_bytes(
                init_free_memory=free + committed,
                free_memory=free_memory,
                committed_bytes=committed_bytes,
                requested_memory=requested,
                transient_peak_bytes=peak,
            )

        assert size(free, committed) == size(free + moved, committed - moved)

    @given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 38))
    def test_the_peak_and_the_margin_stay_free_beside_the_cache(self, free: int, committed: int, peak: int) -> None:
        nbytes = measure_kv_cache_bytes(
            init_free_memory=free + committed,
            free_memory=free,
            committed_bytes=committed,
            requested_memory=1 << 50,
            transient_peak_bytes=peak,
        )
        if nbytes:
            assert free + committed - nbytes >= peak + max(GIB, int(0.75 * peak))

    def test_the_transient_peak_is_the_larger_of_profiled_and_met_in_warmup(self) -> None:
        def peak(profiled: int, warmup: int) -> int:
            return transient_peak(
                profiled_activation_bytes=profiled, warmup_allocated_peak_bytes=warmup, resident_allocated_bytes=16
            )

        assert (peak(5, 20), peak(3, 20), peak(0, 10)) == (5, 4, 0)


class TestAfterWarmup:
    def test_blocks_are_the_most_whose_granule_rounded_segments_fit(self) -> None:
        cache = TwoSegmentCache(num_committed_blocks=1)
        size = decide_final_blocks(cache, reading=reading(free=15 * MIB), constants=NO_MARGIN)
        # 15 MiB free + 8 MiB committed = 23 MiB: 3 blocks take 2 x 10 MiB, 4 take 2 x 12 MiB
        assert (size.blocks, size.reason) == (3, "measured")

    def test_what_multimodal_ipc_needs_is_kept_out_of_the_cache(self) -> None:
        cache = TwoSegmentCache(num_committed_blocks=1)
        size = decide_final_blocks(cache, reading=reading(free=16 * MIB, ipc=5 * MIB), constants=NO_MARGIN)
        assert (size.blocks, size.cache_bytes) == (2, 19 * MIB)

    def test_the_capacity_bounds_the_measured_count(self) -> None:
        size = decide_final_blocks(TwoSegmentCache(capacity_blocks=7), reading=reading(free=GIB), constants=NO_MARGIN)
        assert size.blocks == 7

    def test_explicit_bytes_are_committed_as_given_whatever_was_measured(self) -> None:
        cache = TwoSegmentCache(num_committed_blocks=50)
        size = decide_final_blocks(cache, reading=reading(free=0), explicit_bytes=24 * MIB)
        assert (size.blocks, size.reason) == (4, "explicit")

    def test_no_room_after_warmup_keeps_what_warmup_proved_and_warns(self, caplog: pytest.LogCaptureFixture) -> None:
        cache = TwoSegmentCache(num_committed_blocks=9)
        with caplog.at_level(logging.INFO):
            size = decide_final_blocks(cache, reading=reading(free=0, peak=GIB))
        assert (size.blocks, size.reason) == (9, "kept-warmup")
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "keeps the 9 blocks" in caplog.text

    def test_warmup_that_committed_too_much_is_remapped_and_said(self, caplog: pytest.LogCaptureFixture) -> None:
        cache = TwoSegmentCache(num_committed_blocks=10)
        with caplog.at_level(logging.INFO):
            size = decide_final_blocks(cache, reading=reading(free=0, peak=20 * MIB), constants=NO_MARGIN)
        assert (size.blocks, size.reason) == (6, "shrunk")
        assert "Warmup committed 10 blocks" in caplog.text

    def test_skipped_warmup_takes_the_first_estimate_within_the_capacity(self) -> None:
        assert decide_final_blocks(TwoSegmentCache(), first_pass_blocks=300).blocks == 300
        size = decide_final_blocks(TwoSegmentCache(capacity_blocks=200), first_pass_blocks=300)
        assert (size.blocks, size.reason) == (200, "first-pass")

    def test_nothing_to_decide_from_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="explicit_bytes, a reading after warmup, or first_pass_blocks"):
            decide_final_blocks(TwoSegmentCache())

    def test_a_budget_below_one_block_says_what_one_block_takes(self) -> None:
        with pytest.raises(CapacityError, match=f"One block takes {8 * MIB} bytes"):
            decide_final_blocks(TwoSegmentCache(), explicit_bytes=7 * MIB)


class TestAgreement:
    def test_all_ranks_take_the_least_count_and_the_richer_ones_say_so(self) -> None:
        size = decide_final_blocks(TwoSegmentCache(), explicit_bytes=80 * MIB, agree_minimum=lambda n: min(n, 5))
        assert (size.blocks, size.local_blocks) == (5, 13)
        assert "Another rank has room for 5 blocks only" in size.message

    def test_a_rank_without_room_takes_part_before_it_fails(self) -> None:
        seen: list[int] = []

        def agree(value: int) -> int:
            seen.append(value)
            return value

        with pytest.raises(CapacityError):
            decide_final_blocks(TwoSegmentCache(), explicit_bytes=0, agree_minimum=agree)
        assert seen == [0]

    def test_a_rank_with_room_fails_too_where_another_has_none(self) -> None:
        with pytest.raises(CapacityError, match="on some rank"):
            decide_final_blocks(TwoSegmentCache(), explicit_bytes=80 * MIB, agree_minimum=lambda _: 0)

    def test_a_reduction_that_raises_the_count_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="least value over all ranks"):
            decide_final_blocks(TwoSegmentCache(), explicit_bytes=80 * MIB, agree_minimum=lambda n: n + 1)

    def test_warmup_commits_the_least_over_ranks(self) -> None:
        blocks = committable_blocks(
            TwoSegmentCache(), free_memory=GIB, constants=NO_MARGIN, agree_minimum=lambda n: min(n, 11)
        )
        assert blocks == 11


class TestCommittable:
    def test_reserve_and_margin_stay_out_of_warmups_reach(self) -> None:
        constants = SizingConstants(margin_floor_bytes=40 * MIB, margin_fraction=0.5, warmup_reserve_fraction=0.1)
        # 400 MiB: reserve 40, margin max(40, 20); 320 MiB hold 53 blocks (2 x 160)
        assert committable_blocks(TwoSegmentCache(), free_memory=400 * MIB, constants=constants) == 53

    def test_the_profiled_peak_replaces_a_smaller_reserve(self) -> None:
        constants = SizingConstants(margin_floor_bytes=0, margin_fraction=0.5, warmup_reserve_fraction=0.1)
        blocks = committable_blocks(
            TwoSegmentCache(), free_memory=400 * MIB, activation_peak_bytes=200 * MIB, constants=constants
        )
        assert blocks == TwoSegmentCache().blocks_within(100 * MIB)

    def test_what_is_committed_counts_as_headroom_and_is_never_undercut(self) -> None:
        cache = TwoSegmentCache(num_committed_blocks=20)
        assert committable_blocks(cache, free_memory=0, constants=NO_MARGIN) == 20
        assert committable_blocks(cache, free_memory=0) == 20

    def test_a_known_budget_bounds_it(self) -> None:
        blocks = committable_blocks(TwoSegmentCache(), free_memory=GIB, limit_bytes=24 * MIB, constants=NO_MARGIN)
        assert blocks == 4


class TestRoomForOneRequest:
    def test_a_count_too_small_says_how_many_blocks_bytes_and_tokens(self) -> None:
        with pytest.raises(CapacityError) as caught:
            require_room_for_one_request(27, 32, 1024, bytes_per_block=100)
        message = str(caught.value)
        assert "needs 33 blocks of 32 tokens" in message
        assert "600 bytes more per rank" in message
        assert "max_model_len to 832 or less" in message

    def test_the_null_block_does_not_count(self) -> None:
        require_room_for_one_request(33, 32, 1024)
        with pytest.raises(CapacityError):
            require_room_for_one_request(32, 32, 1024)
        require_room_for_one_request(32, 32, 1024, null_blocks=0)

    def test_the_length_the_message_offers_is_accepted(self) -> None:
        require_room_for_one_request(27, 32, 832)


class TestUtilization:
    def test_unspecified_depends_on_whether_the_cache_grows(self) -> None:
        assert resolve_utilization(None, growable=True) == 1.0
        assert resolve_utilization(None, growable=False) == 0.92

    def test_a_shared_device_needs_it_said_for_a_growable_cache(self) -> None:
        with pytest.raises(ConfigError, match="pid 12, 3 GiB"):
            resolve_utilization(None, growable=True, other_processes=["pid 12, 3 GiB"])
        assert resolve_utilization(0.4, growable=True, other_processes=["pid 12, 3 GiB"]) == 0.4

    @pytest.mark.parametrize("wrong", [0.0, -0.1, 1.01, float("nan")])
    def test_a_share_outside_zero_to_one_is_refused(self, wrong: float) -> None:
        with pytest.raises(ConfigError, match="at most 1"):
            resolve_utilization(wrong, growable=True)


class TestConstants:
    def test_they_are_frozen_and_each_names_its_source(self) -> None:
        with pytest.raises(FrozenInstanceError):
            SizingConstants().margin_fraction = 0.1  # type: ignore[misc]
        names = "|".join(field.name for field in fields(SizingConstants))
        _, *entries = re.split(rf"\b({names}): ", SizingConstants.__doc__ or "")
        described = dict(zip(entries[::2], entries[1::2], strict=True))
        assert list(described) == [field.name for field in fields(SizingConstants)]
        assert all("Source:" in text for text in described.values())

    def test_command_line_goes_before_environment_before_defaults(self) -> None:
        parser = argparse.ArgumentParser()
        SizingConstants.add_arguments(parser)
        environment = {"PDKV_SIZING_MARGIN_FRACTION": "0.2", "PDKV_SIZING_MARGIN_FLOOR_BYTES": "1024"}
        constants = SizingConstants.from_arguments(parser.parse_args(["--sizing-margin-fraction", "0.3"]), environment)
        assert constants == SizingConstants(margin_fraction=0.3, margin_floor_bytes=1024)

    def test_a_child_process_gets_the_same_constants(self) -> None:
        constants = SizingConstants(margin_floor_bytes=150 * MIB, margin_fraction=0.2, fixed_utilization=0.9)
        assert SizingConstants.from_environment(constants.as_environment()) == constants

    def test_a_misspelt_variable_is_an_error_that_lists_the_right_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"PDKV_SIZING_MARGIN names no constant.*PDKV_SIZING_MARGIN_FRACTION"):
            SizingConstants.from_environment({"PDKV_SIZING_MARGIN": "1"})

    @pytest.mark.parametrize(("name", "text"), [("MARGIN_FLOOR_BYTES", "1.5"), ("MARGIN_FRACTION", "much")])
    def test_a_value_that_is_no_number_is_refused(self, name: str, text: str) -> None:
        with pytest.raises(ConfigError, match=f"{name.lower()} of sizing must be"):
            SizingConstants.from_environment({f"PDKV_SIZING_{name}": text})

    @pytest.mark.parametrize(
        "change", [{"margin_fraction": -1.0}, {"warmup_reserve_fraction": 1.0}, {"fixed_utilization": 0.0}]
    )
    def test_values_out_of_range_are_refused(self, change: dict[str, float]) -> None:
        with pytest.raises(ConfigError, match=next(iter(change))):
            SizingConstants(**change)  # type: ignore[arg-type]

    def test_all_of_them_are_logged_in_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            SizingConstants().log()
        (record,) = caplog.records
        assert all(f"{field.name}=" in record.message for field in fields(SizingConstants))


def test_sizing_imports_no_torch() -> None:
    code = "import sys, pdkv.kvcache.sizing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
