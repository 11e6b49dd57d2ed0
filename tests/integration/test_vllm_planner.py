"""The planner's blocks against what real engines report: within one block per segment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine import GROWABLE, EngineProcess

from pdkv.kvcache.sizing import SizingConstants
from pdkv.planner import PlanRequest, make_plan

pytestmark = pytest.mark.vllm

GRANULE = 65536
NO_MARGIN = SizingConstants(margin_floor_bytes=0, margin_fraction=0.0)


def start_and_read(model: Path, tmp_path: Path, environment: dict[str, str], **options: Any) -> dict[str, Any]:
    environment = {"PDKV_STATUS_DIR": str(tmp_path), "PDKV_GRANULE": str(GRANULE), **environment}
    with EngineProcess(model, tmp_path / "log", environment, **GROWABLE, **options) as engine:
        engine.wait_ready()
    status: dict[str, Any] = json.loads((tmp_path / "worker-rank0.json").read_text())
    return status


def plan(model: Path, **settings: Any) -> int:
    request = PlanRequest(model=str(model), model_dtype="float32", context=512, granule=GRANULE, **settings)
    return make_plan(request).pool.blocks


@pytest.mark.parametrize(("kv_bytes", "block_size"), [(100_000_000, 32), (333_333_333, 64)])
def test_a_budget_in_bytes_gives_the_blocks_that_were_planned(
    model: Path, tmp_path: Path, kv_bytes: int, block_size: int
) -> None:
    status = start_and_read(model, tmp_path, {}, kv_cache_memory_bytes=kv_bytes, block_size=block_size)
    planned = plan(model, cache_bytes=kv_bytes, block_size=block_size)
    assert abs(planned - status["final_blocks"]) <= 1
    assert status["block_size"] == block_size
    assert status["segments"] == 30


def test_a_measured_engine_gets_the_blocks_that_are_planned_from_what_it_measured(model: Path, tmp_path: Path) -> None:
    environment = {"PDKV_ENGINE_MEMORY": str(3 << 30), "PDKV_CAPACITY_BLOCKS": "3000"}
    status = start_and_read(model, tmp_path, environment, kv_cache_memory_bytes=None)
    reading = status["reading"]
    resident = reading["init_free_memory"] - reading["free_memory"] - status["warmup_bytes"]
    # A host's free memory does not bind here, so the plan is for a device of just the requested memory, all of it used.
    planned = plan(
        model,
        gpu=str(reading["requested_memory"]),
        utilization=1.0,
        weights_bytes=resident,
        non_torch_bytes=0,
        graph_bytes=0,
        activation_bytes=reading["transient_peak_bytes"],
        block_size=32,
        constants=NO_MARGIN,
    )
    assert abs(planned - status["final_blocks"]) <= 1
    assert status["warmup_blocks"] < status["final_blocks"] < status["capacity_blocks"]
