"""Prefill and decode in real vLLM engines on growable caches, compared with a stock engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import GROWABLE, EngineProcess, nixl_connector, running

pytestmark = pytest.mark.vllm

PAGE_BYTES = 3 * 32 * 2 * 64 * 4  # SmolLM2-135M: 3 KV heads, 32 tokens, K and V of 64, float32
LAYERS = 30
MAX_TOKENS = 12

#: Prompts of lengths below, at and above multiples of the block size of 32.
LENGTHS = (1, 31, 32, 33, 64, 65, 130)
PROMPTS = [[(7 * length + 13 * place) % 4000 + 100 for place in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Tokens of a stock vLLM, without any of pdkv's options."""
    log = tmp_path_factory.mktemp("stock") / "log"
    with EngineProcess(model, log) as stock:
        facts = stock.ask("facts")
        assert facts["worker_class"] == "CPUWorker"
        return [answer["tokens"] for answer in stock.generate(PROMPTS, MAX_TOKENS)]


@pytest.fixture(scope="module", params=["Pull", "Push"])
def engines(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """A prefill and a decode engine whose final block counts differ."""
    folder = tmp_path_factory.mktemp("pd")
    prefill = EngineProcess(model, folder / "prefill.log", **GROWABLE, **nixl_connector("kv_producer", request.param))
    decode = EngineProcess(
        model,
        folder / "decode.log",
        {"PDKV_CAPACITY_BLOCKS": "400", "PDKV_WARMUP_BLOCKS": "10"},
        **GROWABLE,
        **nixl_connector("kv_consumer", request.param),
        kv_cache_memory_bytes=128 << 20,
    )
    with running(prefill, decode):
        yield prefill, decode


_ids = itertools.count(1000, 100)


def run_pd(prefill: EngineProcess, decode: EngineProcess, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt through P, then D, under the same request id; the tokens of D."""
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    first_id = next(_ids)
    answers = prefill.generate(prompts, 1, [ask] * len(prompts), first_id)
    transfer = [answer["transfer"] for answer in answers]
    return [answer["tokens"] for answer in decode.generate(prompts, MAX_TOKENS, transfer, first_id)]


def test_pd_on_grown_caches_gives_the_tokens_of_a_stock_engine(
    engines: tuple[EngineProcess, EngineProcess], reference: list[list[int]]
) -> None:
    prefill, decode = engines
    assert run_pd(prefill, decode, PROMPTS) == reference
    counts = decode.ask("facts")["counts"]
    assert counts["remote_prefill_hits"] == len(PROMPTS)
    assert counts["recomputed_tokens"] == 0
    assert counts["failed_loads"] == 0


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_growth_is_real_and_the_engines_pool_has_exactly_the_final_count(
    engines: tuple[EngineProcess, EngineProcess], which: int
) -> None:
    facts = engines[which].ask("facts")
    cache = facts["cache"]
    assert facts["warmup_blocks"] < cache["committed_blocks"] <= cache["capacity_blocks"]
    assert facts["pool_blocks"] == facts["configured_blocks"] == cache["committed_blocks"]
    assert facts["view_blocks"] == [cache["committed_blocks"]]


def test_prefill_and_decode_end_with_different_counts(engines: tuple[EngineProcess, EngineProcess]) -> None:
    counts = [engine.ask("facts")["cache"]["committed_blocks"] for engine in engines]
    assert counts[0] != counts[1]


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_I4_each_segment_is_one_mapping_for_the_kernel(
    engines: tuple[EngineProcess, EngineProcess], which: int
) -> None:
    engine = engines[which]
    facts = engine.ask("facts")
    maps = Path(f"/proc/{engine.process.pid}/maps").read_text().splitlines()
    ranges = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in maps]
    assert len(facts["extents"]) == LAYERS
    for address, nbytes in facts["extents"]:
        assert sum(start <= address and address + nbytes <= end for start, end in ranges) == 1


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_I5_nixl_holds_exactly_the_committed_extents(engines: tuple[EngineProcess, EngineProcess], which: int) -> None:
    facts = engines[which].ask("facts")
    blocks = facts["cache"]["committed_blocks"]
    assert facts["storage_bytes"] == [blocks * PAGE_BYTES]
    assert sorted(facts["registered"]) == sorted([start, blocks * PAGE_BYTES] for start in facts["storage_start"])
    assert len(facts["registered"]) == LAYERS


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_the_agent_leaves_the_engines_cpu_affinity_as_it_was(
    engines: tuple[EngineProcess, EngineProcess], which: int
) -> None:
    before, after = engines[which].ask("facts")["affinity"]
    assert before == after


def test_a_prefix_cached_on_decode_is_not_read_again(
    engines: tuple[EngineProcess, EngineProcess], reference: list[list[int]]
) -> None:
    prefill, decode = engines
    before = decode.ask("facts")["counts"]
    assert run_pd(prefill, decode, [PROMPTS[-1]]) == [reference[-1]]
    after = decode.ask("facts")["counts"]
    assert after["remote_tokens"] - before["remote_tokens"] < len(PROMPTS[-1])
    assert after["recomputed_tokens"] == before["recomputed_tokens"]


def test_a_request_without_remote_prefill_is_no_remote_hit(engines: tuple[EngineProcess, EngineProcess]) -> None:
    _, decode = engines
    before = decode.ask("facts")["counts"]
    decode.generate([PROMPTS[3]], 4)
    after = decode.ask("facts")["counts"]
    assert after["requests"] == before["requests"] + 1
    assert after["remote_prefill_hits"] == before["remote_prefill_hits"]


def test_an_engine_that_was_not_started_to_sleep_says_so_and_serves_on(
    engines: tuple[EngineProcess, EngineProcess], reference: list[list[int]]
) -> None:
    prefill, decode = engines
    assert "was not started to sleep" in prefill.ask("sleep")
    assert run_pd(prefill, decode, PROMPTS[:2]) == reference[:2]
