"""A model whose KV cache cannot grow starts all the same, on a fixed cache, with and without a connector."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from engine import GROWABLE, EngineProcess, nixl_connector, running
from random_llama import make_random_llama, vocabulary

pytestmark = pytest.mark.vllm

KV_BYTES = 32 << 20
_random = random.Random(11)
PROMPTS = [[_random.randrange(10, vocabulary("tiny")) for _ in range(length)] for length in (20, 64, 130, 300)]
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": KV_BYTES}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("hybrid"), "tiny", hybrid=True)


@pytest.fixture(scope="module")
def stock(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], int]:
    """Tokens and the number of blocks of a stock engine."""
    with EngineProcess(hybrid, tmp_path_factory.mktemp("stock") / "log", **OPTIONS) as engine:
        return [answer["tokens"] for answer in engine.generate(PROMPTS)], engine.ask("facts")["pool_blocks"]


def test_a_hybrid_model_falls_back_to_a_fixed_cache_and_says_why(
    hybrid: Path, stock: tuple[list[list[int]], int], tmp_path: Path
) -> None:
    expected, stock_blocks = stock
    status = tmp_path / "status"
    with EngineProcess(
        hybrid, tmp_path / "pdkv.log", {"PDKV_STATUS_DIR": str(status)}, **GROWABLE, **OPTIONS
    ) as engine:
        assert [answer["tokens"] for answer in engine.generate(PROMPTS)] == expected
        assert engine.ask("facts")["pool_blocks"] == stock_blocks
    said = json.loads((status / "worker-rank0.json").read_text())
    assert not said["growable"]
    assert "2 KV cache groups" in said["fixed_because"]
    assert said["final_blocks"] == said["capacity_blocks"] == stock_blocks
    assert said["block_size"] == 32
    log = (tmp_path / "pdkv.log").read_text()
    assert "the KV cache stays fixed, as without pdkv: this model has 2 KV cache groups" in log


def test_prefill_and_decode_work_over_fixed_caches(
    hybrid: Path, stock: tuple[list[list[int]], int], tmp_path: Path
) -> None:
    expected, _ = stock
    prefill = EngineProcess(hybrid, tmp_path / "p.log", **GROWABLE, **OPTIONS, **nixl_connector("kv_producer"))
    decode = EngineProcess(hybrid, tmp_path / "d.log", **GROWABLE, **OPTIONS, **nixl_connector("kv_consumer"))
    # Prefill keeps blocks for 30 s without hearing of anybody who wants them; decode may start for longer.
    with running(prefill, decode):
        ask = {"do_remote_decode": True, "do_remote_prefill": False}
        answers = prefill.generate(PROMPTS, 1, [ask] * len(PROMPTS))
        found = decode.generate(PROMPTS, 16, [answer["transfer"] for answer in answers])
        counts = decode.ask("facts")["counts"]
    assert [answer["tokens"] for answer in found] == expected
    assert counts["remote_prefill_hits"] == len(PROMPTS)
    assert counts["recomputed_tokens"] == 0
