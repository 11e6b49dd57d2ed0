"""Which memory utilization counts as given, what a shared card means, and which layouts stay fixed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test installs it")

import torch
from vllm.config import CacheConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from pdkv.errors import ConfigError
from pdkv_connectors.vllm.placement import why_not_growable
from pdkv_connectors.vllm.settings import EngineSettings
from pdkv_connectors.vllm.utilization import given_utilization, processes_beside

pytestmark = pytest.mark.vllm

TOTAL = 100 << 30
GRANULE = 2 << 20


class NvmlWithoutDriver:
    NVMLError = type("NVMLError", (Exception,), {})

    def nvmlInit(self) -> None:
        raise self.NVMLError("Driver Not Loaded")


@pytest.mark.parametrize(
    ("option", "environment", "expected"),
    [
        (None, {}, None),
        (0.92, {}, None),
        (0.9, {}, 0.9),
        (1.0, {}, 1.0),
        (0.92, {"PDKV_MEMORY_UTILIZATION": "0.92"}, 0.92),
        (0.5, {"PDKV_MEMORY_UTILIZATION": "0.7"}, 0.7),
        (0.5, {"PDKV_ENGINE_MEMORY": str(TOTAL // 4), "PDKV_MEMORY_UTILIZATION": "0.7"}, 0.25),
        (None, {"PDKV_ENGINE_MEMORY": str(3 * TOTAL)}, 1.0),
    ],
)
def test_vllms_default_counts_as_not_given(
    option: float | None, environment: dict[str, str], expected: float | None
) -> None:
    config = CacheConfig() if option is None else CacheConfig(gpu_memory_utilization=option)
    assert given_utilization(config, EngineSettings.from_environment(environment), TOTAL) == expected


@pytest.mark.parametrize("text", ["0", "1.01", "much", "nan"])
def test_a_utilization_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="PDKV_MEMORY_UTILIZATION"):
        EngineSettings.from_environment({"PDKV_MEMORY_UTILIZATION": text})


def test_where_nvml_cannot_say_nobody_is_assumed_and_a_warning_asks_for_a_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pdkv_connectors.vllm import utilization

    said: list[str] = []
    monkeypatch.setattr(utilization.logger, "warning", lambda text, *args: said.append(text % args))
    assert processes_beside("ab", NvmlWithoutDriver()) == ()
    assert "Driver Not Loaded" in said[0]
    assert "--gpu-memory-utilization" in said[0]


def vllm_config(layout: str) -> Any:
    """As much of vLLM's configuration as its planning of the cache reads."""
    config = CacheConfig()
    config.kv_cache_layout = layout
    return SimpleNamespace(
        cache_config=config,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=None,
    )


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32, **changes}
    )


def test_layers_of_one_kind_in_a_block_compact_layout_can_grow() -> None:
    for layout in ("LBHNC", "LBNHC", "BLHNC"):
        assert why_not_growable(vllm_config(layout), {"a": full(), "b": full()}, GRANULE) is None


def test_a_layout_that_spreads_blocks_stays_fixed_and_growable_ones_are_named() -> None:
    reason = why_not_growable(vllm_config("LHBNC"), {"a": full(), "b": full()}, GRANULE)
    assert reason is not None
    assert "LHBNC" in reason
    assert "LBHNC" in reason


def test_hybrids_stay_fixed() -> None:
    window = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64)
    reason = why_not_growable(vllm_config("LBHNC"), {"a": full(), "b": window}, GRANULE)
    assert reason is not None
    assert "2 KV cache groups" in reason


def test_a_layer_without_attention_pages_stays_fixed() -> None:
    state = MambaSpec(block_size=1024, shapes=((16, 16),), dtypes=(torch.float32,))
    reason = why_not_growable(vllm_config("LBHNC"), {"a": state}, GRANULE)
    assert reason is not None
    assert "MambaSpec" in reason
