"""Prefill and decode in real vLLM engines on one card, on caches grown in CUDA virtual memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine import EngineProcess, nixl_connector
from random_llama import vocabulary

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.gpu

MAX_TOKENS = 24
LAYERS = 8
GROWABLE = {"worker_cls": "pdkv_connectors.vllm.worker.GrowableGPUWorker"}
OPTIONS: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 16,
    "skip_tokenizer_init": True,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 512 << 20,
    "enable_prefix_caching": True,
}
_random = random.Random(5)
LENGTHS = (5, 15, 16, 17, 64, 130, 513, 1500)
PROMPTS = [[_random.randrange(10, vocabulary("wide")) for _ in range(length)] for length in LENGTHS]


@dataclass(frozen=True)
class Case:
    """One way to run the engines. Token identity needs arithmetic that does not depend on the batch."""

    name: str
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


FLOAT32 = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
IEEE = {"TRITON_F32_DEFAULT": "ieee"}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
V1, V2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 8]}}
COMPILE = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 8]}}
CASES = (
    Case("v2-eager-float32", {**FLOAT32, "enforce_eager": True}, {**IEEE, **V2}),
    Case("v1-eager-float32", {**FLOAT32, "enforce_eager": True}, {**IEEE, **V1}),
    Case("v2-graphs-bfloat16", {"dtype": "bfloat16", **GRAPHS, "enforce_eager": False}, {**INVARIANT, **V2}),
    Case("v1-graphs-bfloat16", {"dtype": "bfloat16", **GRAPHS, "enforce_eager": False}, {**INVARIANT, **V1}),
    Case("v2-compile-bfloat16", {"dtype": "bfloat16", **COMPILE, "enforce_eager": False}, {**INVARIANT, **V2}),
)


@pytest.fixture
def start(launch: Callable[..., EngineProcess]) -> Callable[..., EngineProcess]:
    """Start an engine of a case."""

    def of_case(case: Case, name: str, environment: dict[str, str] | None = None, **options: Any) -> EngineProcess:
        return launch(name, {**case.environment, **(environment or {})}, **{**OPTIONS, **case.options, **options})

    return of_case


def connector(role: str) -> dict[str, Any]:
    """pdkv's pull connector, with KV on the device."""
    config = nixl_connector(role)
    config["kv_transfer_config"]["kv_buffer_device"] = "cuda"
    return config


def run_pd(prefill: EngineProcess, decode: EngineProcess) -> list[list[int]]:
    """All prompts through P, then D; the tokens of D."""
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    answers = prefill.generate(PROMPTS, 1, [ask] * len(PROMPTS))
    transfer = [answer["transfer"] for answer in answers]
    return [answer["tokens"] for answer in decode.generate(PROMPTS, MAX_TOKENS, transfer)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pd_gives_the_tokens_of_a_stock_engine(
    case: Case, start: Callable[..., EngineProcess], record: Callable[..., None]
) -> None:
    stock = start(case, "stock")
    prefill = start(case, "prefill", **GROWABLE, **connector("kv_producer"))
    decode = start(case, "decode", **GROWABLE, **connector("kv_consumer"), kv_cache_memory_bytes=384 << 20)
    expected = [answer["tokens"] for answer in stock.generate(PROMPTS, MAX_TOKENS)]
    graphs_before = decode.ask("graphs")
    found = run_pd(prefill, decode)
    equal = sum(one == other for one, other in zip(expected, found, strict=True))
    facts = {"prefill": prefill.ask("facts"), "decode": decode.ask("facts")}
    graphs = decode.ask("graphs")
    record(
        "vllm-pd",
        case=case.name,
        equal=f"{equal}/{len(PROMPTS)}",
        graph_captures=graphs["captures"],
        graph_replays=graphs["replays"],
        **{f"{name}_{key}": fact["cache"][key] for name, fact in facts.items() for key in ("committed_blocks",)},
        warmup_blocks=facts["decode"]["warmup_blocks"],
        chunks_per_segment=facts["decode"]["cache"]["chunks_per_segment"],
        times_s=facts["decode"]["times_s"],
    )
    assert found == expected
    assert facts["decode"]["counts"]["remote_prefill_hits"] == len(PROMPTS)
    assert facts["decode"]["counts"]["recomputed_tokens"] == 0
    for fact in facts.values():
        cache = fact["cache"]
        assert fact["warmup_blocks"] < cache["committed_blocks"] == fact["pool_blocks"]
        assert cache["chunks_per_segment"] == 1
        assert len(fact["registered"]) == LAYERS
    assert facts["prefill"]["pool_blocks"] != facts["decode"]["pool_blocks"]
    assert graphs["captures"] == graphs_before["captures"], "graphs captured before growth must serve after it"
    if not case.options["enforce_eager"]:
        assert graphs["captures"] > 0
        assert graphs["replays"] > graphs_before["replays"]


def test_decode_that_zeroes_what_it_received_gives_other_tokens(
    start: Callable[..., EngineProcess], record: Callable[..., None]
) -> None:
    case = CASES[0]
    stock = start(case, "stock")
    prefill = start(case, "prefill", **GROWABLE, **connector("kv_producer"))
    decode = start(case, "decode", {"PDKV_CORRUPT_RECEIVED_KV": "1"}, **GROWABLE, **connector("kv_consumer"))
    expected = [answer["tokens"] for answer in stock.generate(PROMPTS, MAX_TOKENS)]
    found = run_pd(prefill, decode)
    equal = sum(one == other for one, other in zip(expected, found, strict=True))
    record("vllm-pd", case="zeroed (negative control)", equal=f"{equal}/{len(PROMPTS)}")
    assert equal == 0


def test_what_start_up_leaves_free_on_the_card(
    start: Callable[..., EngineProcess], record: Callable[..., None]
) -> None:
    import torch

    case = Case("measured", {"dtype": "bfloat16", **COMPILE, "enforce_eager": False}, {**INVARIANT, **V2})
    left: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for name, options in (
        ("stock-0.92", {"gpu_memory_utilization": 0.92}),
        ("pdkv-1.0", {**GROWABLE, "gpu_memory_utilization": 1.0}),
    ):
        engine = start(case, name, kv_cache_memory_bytes=None, **options)
        facts = engine.ask("facts")
        left[name] = torch.cuda.mem_get_info(0)[0]
        tokens[name] = facts["pool_blocks"] * OPTIONS["block_size"]
        engine.generate(PROMPTS, MAX_TOKENS)
        engine.close()
        record("vllm-left-free", engine=name, bytes_free=left[name], kv_tokens=tokens[name])
    assert tokens["pdkv-1.0"] > tokens["stock-0.92"]
    assert left["pdkv-1.0"] > 0
