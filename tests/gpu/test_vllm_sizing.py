"""What a real engine takes of a card: all of it, measured; or a fixed share where its cache cannot grow.

The card must be free of others, and of this process too: so nothing here touches CUDA, NVML tells what is free.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import EngineProcess
from random_llama import make_random_llama

pytest.importorskip("vllm", reason="vLLM is not installed")

from pdkv.testing.child import ChildError

pytestmark = pytest.mark.gpu

GIB = 1 << 30
GROWABLE = {"worker_cls": "pdkv_connectors.vllm.worker.GrowableGPUWorker"}
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": 16,
    "max_model_len": 1024,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 16,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": None,
}
_INTEGRATION = Path(__file__).parents[1] / "integration"
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(_INTEGRATION), os.environ.get("PYTHONPATH", "")])}
_random = random.Random(23)
PROMPTS = [[_random.randrange(10, 500) for _ in range(length)] for length in (20, 64, 130, 900)]


@pytest.fixture
def card() -> Iterator[Callable[[], Any]]:
    """Reads `total`, `free` and `used` of the card, in bytes."""
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def read() -> Any:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)

    if read().used > GIB // 4:
        pytest.skip("somebody uses the card, this process perhaps: run this file by itself")
    yield read
    pynvml.nvmlShutdown()


def test_without_a_utilization_the_card_is_taken_and_no_other_engine_may_do_so_too(
    llama: Path, tmp_path: Path, card: Callable[[], Any], record: Callable[..., None]
) -> None:
    with EngineProcess(llama, tmp_path / "stock.log", **OPTIONS) as stock:
        stock_tokens = stock.ask("facts")["pool_blocks"] * 16
    with EngineProcess(llama, tmp_path / "pdkv.log", **GROWABLE, **OPTIONS) as engine:
        tokens = engine.ask("facts")["pool_blocks"] * 16
        left = int(card().free)
        engine.generate(PROMPTS * 4, 32)
        with (
            EngineProcess(llama, tmp_path / "second.log", **GROWABLE, **OPTIONS) as second,
            pytest.raises(ChildError, match="used by 1 other process") as refused,
        ):
            second.wait_ready()
        engine.generate(PROMPTS, 4)
    record("vllm-sizing", stock_kv_tokens=stock_tokens, pdkv_kv_tokens=tokens, bytes_left=left)
    assert tokens > stock_tokens
    assert left > GIB // 2
    assert "memory utilization" in str(refused.value)
    assert "torch may hold" in (tmp_path / "pdkv.log").read_text()


def test_memory_that_warmup_takes_beyond_the_profile_fails_the_estimate_and_is_measured(
    llama: Path, tmp_path: Path, card: Callable[[], Any], record: Callable[..., None]
) -> None:
    total = int(card().total)
    extra = int(0.12 * total)  # a fixed engine leaves 0.08 of the card
    environment = {**ENVIRONMENT, "PDKV_TEST_WARMUP_BYTES": str(extra)}
    with (
        EngineProcess(
            llama, tmp_path / "fixed.log", environment, **OPTIONS, worker_cls="ballast_workers.GreedyStockGPUWorker"
        ) as fixed,
        pytest.raises(ChildError),
    ):
        fixed.wait_ready()
    assert "out of memory" in (tmp_path / "fixed.log").read_text()
    with EngineProcess(
        llama, tmp_path / "measured.log", environment, **OPTIONS, worker_cls="ballast_workers.GreedyGPUWorker"
    ) as measured:
        facts = measured.ask("facts")
        measured.generate(PROMPTS * 4, 32)
    record("vllm-stress", extra_bytes=extra, fixed="out of memory", measured_kv_tokens=facts["pool_blocks"] * 16)
    assert facts["cache"]["bytes_committed"] < total - extra


def test_a_hybrid_model_gets_the_fixed_cache_of_a_stock_engine(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, card: Callable[[], Any], record: Callable[..., None]
) -> None:
    hybrid = make_random_llama(tmp_path_factory.mktemp("hybrid"), "tiny", hybrid=True)
    blocks: dict[str, int] = {}
    answers: dict[str, Any] = {}
    for name, options in (("stock", {}), ("pdkv", GROWABLE)):
        with EngineProcess(hybrid, tmp_path / f"{name}.log", **options, **OPTIONS) as engine:
            blocks[name] = engine.ask("pool_blocks")
            answers[name] = engine.generate(PROMPTS, 8)
    record("vllm-fallback", **blocks)
    assert blocks["pdkv"] == pytest.approx(blocks["stock"], rel=0.01)
    assert answers["pdkv"] == answers["stock"]
    assert "the KV cache stays fixed" in (tmp_path / "pdkv.log").read_text()
