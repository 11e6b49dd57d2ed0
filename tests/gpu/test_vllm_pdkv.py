"""`PdkvConnector` in real vLLM engines on one card: equal tokens, and the bandwidth at which KV really moved."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from engine import EngineProcess, free_port, pdkv_connector
from random_llama import vocabulary

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.gpu

MAX_TOKENS = 24
GROWABLE = {"worker_cls": "pdkv_connectors.vllm.worker.GrowableGPUWorker"}
OPTIONS: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,  # the longest prompts are prefilled in chunks
    "max_num_seqs": 16,
    "skip_tokenizer_init": True,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_prefix_caching": True,
}
FLOAT32 = {"dtype": "float32", "attention_backend": "TRITON_ATTN", "enforce_eager": True}
INVARIANT = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 8]},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "float32-eager": (FLOAT32, {"TRITON_F32_DEFAULT": "ieee"}),
    "bfloat16-graphs": (INVARIANT, {"VLLM_BATCH_INVARIANT": "1"}),
}
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
_random = random.Random(11)
LENGTHS = (5, 15, 16, 17, 64, 130, 513, 3000)
PROMPTS = [[_random.randrange(10, vocabulary("wide")) for _ in range(length)] for length in LENGTHS]


@pytest.fixture
def start(launch: Callable[..., EngineProcess]) -> Callable[..., EngineProcess]:
    """Start an engine of a case."""

    def of_case(case: str, name: str, environment: dict[str, str] | None = None, **options: Any) -> EngineProcess:
        case_options, case_environment = CASES[case]
        return launch(name, {**case_environment, **(environment or {})}, **{**OPTIONS, **case_options, **options})

    return of_case


def connector(role: str, port: int, transport: str) -> dict[str, Any]:
    config = pdkv_connector(role, port, transport=transport)
    config["kv_transfer_config"]["kv_buffer_device"] = "cuda"
    return config


def run_pd(prefill: EngineProcess, decode: EngineProcess) -> list[list[int]]:
    """All prompts through P, then D; the tokens of D."""
    transfer = [answer["transfer"] for answer in prefill.generate(PROMPTS, 1, [ASK] * len(PROMPTS))]
    return [answer["tokens"] for answer in decode.generate(PROMPTS, MAX_TOKENS, transfer)]


@pytest.mark.parametrize(
    ("case", "transport", "block_size"),
    [
        ("float32-eager", "ipc", 16),
        ("bfloat16-graphs", "ipc", 16),
        ("float32-eager", "nixl", 16),
        ("float32-eager", "ipc", 64),
    ],
)
def test_pd_gives_the_tokens_of_a_stock_engine(
    case: str, transport: str, block_size: int, start: Callable[..., EngineProcess], record: Callable[..., None]
) -> None:
    """Prefill has blocks of 16 tokens, decode of `block_size`."""
    port = free_port()
    stock = start(case, "stock")
    prefill = start(case, "prefill", **GROWABLE, **connector("kv_producer", port, transport))
    decode = start(
        case,
        "decode",
        **GROWABLE,
        **connector("kv_consumer", port, transport),
        kv_cache_memory_bytes=768 << 20,
        block_size=block_size,
    )
    expected = [answer["tokens"] for answer in stock.generate(PROMPTS, MAX_TOKENS)]
    found = run_pd(prefill, decode)
    facts = decode.ask("facts")
    moved = facts["metrics"]["transport"]["ranks"][0]
    record(
        "vllm-pdkv",
        case=case,
        transport=transport,
        decode_block_size=block_size,
        equal=f"{sum(one == other for one, other in zip(expected, found, strict=True))}/{len(PROMPTS)}",
        moved_bytes=moved["bytes"],
        moving_s=moved["moving_s"],
        gb_per_s=round(moved["bytes"] / moved["moving_s"] / 1e9, 2),
        counters=facts["metrics"]["counters"],
    )
    assert found == expected
    assert facts["counts"]["remote_prefill_hits"] == len(PROMPTS)
    assert facts["counts"]["recomputed_tokens"] == 0
    assert facts["metrics"]["transport"]["reads"] == len(PROMPTS)
    assert moved["transport"] == transport
    assert prefill.ask("facts")["pool_blocks"] != facts["pool_blocks"]


def test_decode_that_zeroes_what_it_received_gives_other_tokens(
    start: Callable[..., EngineProcess], record: Callable[..., None]
) -> None:
    port = free_port()
    case = "float32-eager"
    stock = start(case, "stock")
    prefill = start(case, "prefill", **GROWABLE, **connector("kv_producer", port, "ipc"))
    decode = start(
        case, "decode", {"PDKV_CORRUPT_RECEIVED_KV": "1"}, **GROWABLE, **connector("kv_consumer", port, "ipc")
    )
    expected = [answer["tokens"] for answer in stock.generate(PROMPTS, MAX_TOKENS)]
    found = run_pd(prefill, decode)
    equal = sum(one == other for one, other in zip(expected, found, strict=True))
    record("vllm-pdkv", case="zeroed (negative control)", equal=f"{equal}/{len(PROMPTS)}")
    assert equal == 0
