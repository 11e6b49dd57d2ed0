"""How an engine starts, or refuses to, with pdkv installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine import GROWABLE, EngineProcess, nixl_connector

from pdkv.testing.child import ChildError

pytestmark = pytest.mark.vllm

PROMPT = list(range(100, 150))


def refuse(model: Path, tmp_path: Path, environment: dict[str, str] | None = None, **options: Any) -> str:
    """Start an engine that should refuse; what it says."""
    with (
        EngineProcess(model, tmp_path / "log", environment, **options) as engine,
        pytest.raises(ChildError) as caught,
    ):
        engine.wait_ready()
    return str(caught.value)


def test_without_the_worker_class_the_plugin_is_inert(model: Path, tmp_path: Path) -> None:
    with EngineProcess(model, tmp_path / "log", fresh=True) as engine:
        facts = engine.ask("facts")
    assert facts["wrapped"], "the plug-in was not even loaded, so this shows nothing"
    assert facts["worker_class"] == "CPUWorker"
    assert facts["pool_blocks"] == facts["configured_blocks"] == (256 << 20) // (30 * 3 * 32 * 2 * 64 * 4)
    assert "pdkv: " not in (tmp_path / "log").read_text()


def test_a_growable_engine_needs_no_connector_and_sizes_itself_by_what_warmup_used(model: Path, tmp_path: Path) -> None:
    environment = {"PDKV_ENGINE_MEMORY": str(3 << 30), "PDKV_CAPACITY_BLOCKS": "1500"}
    with EngineProcess(model, tmp_path / "log", environment, **GROWABLE, kv_cache_memory_bytes=None) as engine:
        tokens = engine.generate([PROMPT], 4)[0]["tokens"]
        facts = engine.ask("facts")
    assert len(tokens) == 4
    assert facts["warmup_blocks"] < facts["cache"]["committed_blocks"] < facts["cache"]["capacity_blocks"]
    assert facts["cache"]["bytes_committed"] < 3 << 30
    assert "measured after warmup" in (tmp_path / "log").read_text()


def test_a_count_too_small_for_one_request_is_refused_with_the_count_that_would_do(model: Path, tmp_path: Path) -> None:
    said = refuse(model, tmp_path, **GROWABLE, kv_cache_memory_bytes=16 << 20)
    assert "CapacityError" in said
    assert "17 blocks" in said


def test_a_capacity_too_small_for_one_request_is_refused(model: Path, tmp_path: Path) -> None:
    said = refuse(model, tmp_path, {"PDKV_CAPACITY_BLOCKS": "8"}, **GROWABLE)
    assert "CapacityError" in said


def test_a_stock_connector_on_a_growable_cache_is_refused(model: Path, tmp_path: Path) -> None:
    said = refuse(model, tmp_path, **GROWABLE, **nixl_connector("kv_producer", stock=True))
    assert "registers the KV cache before it has grown" in said


def test_the_late_connector_without_a_growable_worker_is_refused(model: Path, tmp_path: Path) -> None:
    said = refuse(model, tmp_path, **nixl_connector("kv_producer"))
    assert "--worker-cls" in said


def test_a_vllm_that_does_not_load_the_plugin_is_refused(model: Path, tmp_path: Path) -> None:
    said = refuse(model, tmp_path, {"VLLM_PLUGINS": "nothing"}, **GROWABLE)
    assert "plug-in is not loaded" in said
