"""Decode with two ranks on two cards, one with less memory, fed by prefill with one rank."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine import EngineProcess, nixl_connector
from random_llama import vocabulary

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.gpu

MAX_TOKENS = 24
BALLAST_BYTES = 8 << 30
#: Token identity needs arithmetic that does not depend on the batch; float32 leaves room for the ranks' own sums.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "TRITON_ATTN",
    "enforce_eager": True,
    "block_size": 16,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 16,
    "skip_tokenizer_init": True,
    "gpu_memory_utilization": 0.2,
}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
_INTEGRATION = Path(__file__).parents[1] / "integration"
ENVIRONMENT = {
    "TRITON_F32_DEFAULT": "ieee",
    "PYTHONPATH": os.pathsep.join([str(_INTEGRATION), os.environ.get("PYTHONPATH", "")]),
}
_random = random.Random(29)
PROMPTS = [[_random.randrange(10, vocabulary("wide")) for _ in range(length)] for length in (5, 16, 17, 130, 513, 1500)]


@pytest.fixture(autouse=True)
def _two_cards() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, found {torch.cuda.device_count()}")


def connector(role: str) -> dict[str, Any]:
    config = nixl_connector(role)
    config["kv_transfer_config"]["kv_buffer_device"] = "cuda"
    return config


def test_both_ranks_commit_the_smaller_count_and_one_rank_of_prefill_feeds_them(
    llama: Path, tmp_path: Path, record: Callable[..., None]
) -> None:
    with EngineProcess(llama, tmp_path / "stock.log", ENVIRONMENT, **OPTIONS, **TWO_RANKS) as stock:
        expected = [answer["tokens"] for answer in stock.generate(PROMPTS, MAX_TOKENS)]
    status = tmp_path / "status"
    prefill_options = {**OPTIONS, **connector("kv_producer"), "kv_cache_memory_bytes": 512 << 20}
    prefill_options["worker_cls"] = "pdkv_connectors.vllm.worker.GrowableGPUWorker"
    decode_options = {**OPTIONS, **TWO_RANKS, **connector("kv_consumer"), "kv_cache_memory_bytes": None}
    decode_options["worker_cls"] = "ballast_workers.BallastGPUWorker"
    decode_environment = {
        **ENVIRONMENT,
        "PDKV_STATUS_DIR": str(status),
        "PDKV_TEST_BALLAST": f"1:{BALLAST_BYTES}",
    }
    # One after the other: an engine that profiles must not see another one give memory back.
    with EngineProcess(llama, tmp_path / "p.log", ENVIRONMENT, **prefill_options) as prefill:
        prefill.wait_ready()
        with EngineProcess(llama, tmp_path / "d.log", decode_environment, **decode_options) as decode:
            # Decode starts for longer than prefill keeps blocks without hearing of anybody who wants them.
            decode.wait_ready()
            ask = {"do_remote_decode": True, "do_remote_prefill": False}
            answers = prefill.generate(PROMPTS, 1, [ask] * len(PROMPTS))
            found = decode.generate(PROMPTS, MAX_TOKENS, [answer["transfer"] for answer in answers])
            pool = decode.ask("pool_blocks")
    ranks = [json.loads((status / f"worker-rank{rank}.json").read_text()) for rank in range(2)]
    counts = json.loads((status / "scheduler.json").read_text())
    equal = sum(one["tokens"] == other for one, other in zip(found, expected, strict=True))
    used = [r["reading"]["init_free_memory"] - r["reading"]["free_memory"] - r["warmup_bytes"] for r in ranks]
    record(
        "vllm-tp2",
        equal=f"{equal}/{len(PROMPTS)}",
        final_blocks=[rank["final_blocks"] for rank in ranks],
        non_kv_bytes=used,
        remote_hits=counts["remote_prefill_hits"],
    )
    assert [rank["final_blocks"] for rank in ranks] == [pool, pool]
    assert ranks[0]["warmup_blocks"] == ranks[1]["warmup_blocks"]
    assert used[1] - used[0] > BALLAST_BYTES // 2
    block_bytes = ranks[0]["bytes_committed"] / pool
    assert ranks[0]["reading"]["requested_memory"] - used[0] - pool * block_bytes > BALLAST_BYTES // 2
    assert "Another rank has room for" in (tmp_path / "d.log").read_text()
    assert [answer["tokens"] for answer in found] == expected
    assert counts["remote_prefill_hits"] == len(PROMPTS)
    assert counts["recomputed_tokens"] == counts["failed_loads"] == 0
