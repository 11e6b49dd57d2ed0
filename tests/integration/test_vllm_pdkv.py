"""`PdkvConnector` in real vLLM engines on growable caches, compared with a stock engine."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import GROWABLE, EngineProcess, free_port, pdkv_connector, running
from random_llama import make_random_llama, vocabulary

pytestmark = pytest.mark.vllm

LAYERS = 30
MAX_TOKENS = 12
ASK = {"do_remote_decode": True, "do_remote_prefill": False}

#: Prompts of lengths below, at and above multiples of the block size of 32.
LENGTHS = (1, 31, 32, 33, 64, 65, 130, 400)
PROMPTS = [[(7 * length + 13 * place) % 4000 + 100 for place in range(length)] for length in LENGTHS]
#: The last one again, with another end: all but one of its blocks are in the prefix cache by then.
SHARED_PREFIX = [*PROMPTS[-1][:384], *range(500, 540)]


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Tokens of a stock vLLM, without any of pdkv's options; the last are those of the shared prefix."""
    with EngineProcess(model, tmp_path_factory.mktemp("stock") / "log") as stock:
        return [answer["tokens"] for answer in stock.generate([*PROMPTS, SHARED_PREFIX], MAX_TOKENS)]


Engines = tuple[EngineProcess, EngineProcess]


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A prefill engine, which computes long prompts in chunks, and a decode engine with another block count."""
    folder, port = tmp_path_factory.mktemp("pd"), free_port()
    prefill = EngineProcess(
        model,
        folder / "prefill.log",
        {"PDKV_SLEEP": "1"},
        **GROWABLE,
        **pdkv_connector("kv_producer", port),
        max_num_batched_tokens=256,
    )
    decode = EngineProcess(
        model,
        folder / "decode.log",
        {"PDKV_CAPACITY_BLOCKS": "400", "PDKV_WARMUP_BLOCKS": "10", "PDKV_SLEEP": "1"},
        **GROWABLE,
        **pdkv_connector("kv_consumer", port, pdkv_silence_s=3.0),
        kv_cache_memory_bytes=128 << 20,
    )
    with running(prefill, decode):
        yield prefill, decode


def hand_over(prefill: EngineProcess, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The parameters that P returns for each prompt, as D is to get them."""
    return [answer["transfer"] for answer in prefill.generate(prompts, 1, [ASK] * len(prompts))]


def run_pd(engines: Engines, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt through P, then D; the tokens of D."""
    prefill, decode = engines
    transfer = hand_over(prefill, prompts)
    return [answer["tokens"] for answer in decode.generate(prompts, MAX_TOKENS, transfer)]


def counts(engine: EngineProcess) -> dict[str, int]:
    return dict(engine.ask("facts")["counts"])


def wait_until_free(prefill: EngineProcess) -> None:
    """Have P step until it holds no lease; the longest that one can last without renewal is 30 s."""
    for _ in range(300):
        if not prefill.ask("facts")["metrics"]["held_requests"]:
            return
        prefill.ask("outcome", request_id="nobody's", within_s=0.2)
    raise AssertionError(prefill.ask("facts")["metrics"])


def test_pd_gives_the_tokens_of_a_stock_engine(engines: Engines, reference: list[list[int]]) -> None:
    assert run_pd(engines, PROMPTS) == reference[:-1]
    assert counts(engines[1])["remote_prefill_hits"] == len(PROMPTS)
    assert counts(engines[1])["recomputed_tokens"] == 0
    assert counts(engines[1])["failed_loads"] == 0
    wait_until_free(engines[0])


def test_prefill_and_decode_have_different_counts_and_one_chunk_a_segment(engines: Engines) -> None:
    caches = [engine.ask("facts")["cache"] for engine in engines]
    assert caches[0]["committed_blocks"] != caches[1]["committed_blocks"]
    assert [cache["chunks_per_segment"] for cache in caches] == [1, 1]


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_I5_exactly_the_committed_extents_are_registered(engines: Engines, which: int) -> None:
    facts = engines[which].ask("facts")
    assert sorted(facts["registered"]) == sorted(facts["extents"])
    assert len(facts["registered"]) == LAYERS


def test_a_prefix_cached_on_decode_is_not_read_again(engines: Engines, reference: list[list[int]]) -> None:
    before = counts(engines[1])
    assert run_pd(engines, [SHARED_PREFIX]) == reference[-1:]
    after = counts(engines[1])
    assert after["remote_tokens"] - before["remote_tokens"] == len(SHARED_PREFIX) - 384
    assert after["recomputed_tokens"] == before["recomputed_tokens"]


def test_a_request_without_remote_prefill_is_computed_here(engines: Engines, reference: list[list[int]]) -> None:
    before = counts(engines[1])
    assert engines[1].generate([PROMPTS[3]], MAX_TOKENS)[0]["tokens"] == reference[3]
    assert counts(engines[1])["remote_prefill_hits"] == before["remote_prefill_hits"]


def test_used_and_altered_parameters_fail_their_requests_and_no_others(
    engines: Engines, reference: list[list[int]]
) -> None:
    prefill, decode = engines
    used, altered, good = hand_over(prefill, [PROMPTS[4], PROMPTS[5], PROMPTS[6]])
    assert decode.generate([PROMPTS[4]], MAX_TOKENS, [copy.deepcopy(used)])[0]["tokens"] == reference[4]
    altered["pdkv"]["blocks"][0][1][0] += 1
    prompts = [[11, *PROMPTS[4][1:]], [11, *PROMPTS[5][1:]], PROMPTS[6]]  # not in the prefix cache
    answers = decode.generate(prompts, MAX_TOKENS, [used, altered, good])
    assert [answer["tokens"] for answer in answers] == [[], [], reference[6]]
    wait_until_free(prefill)  # the altered one's lease runs out: decode had no right to end it


def test_a_client_that_leaves_before_its_request_is_scheduled_frees_prefill(engines: Engines) -> None:
    prefill, decode = engines
    (transfer,) = hand_over(prefill, [PROMPTS[6]])
    decode.ask("submit", request_id="gone", prompt=PROMPTS[6], max_tokens=4, transfer=transfer, steps=0)
    wait_until_free(prefill)


def test_a_client_that_leaves_while_its_request_loads_frees_both_sides(
    engines: Engines, reference: list[list[int]]
) -> None:
    prefill, decode = engines
    prompt = [13, *PROMPTS[7][1:]]
    (transfer,) = hand_over(prefill, [prompt])
    decode.ask("submit", request_id="leaves", prompt=prompt, max_tokens=4, transfer=transfer, steps=1)
    wait_until_free(prefill)
    assert run_pd(engines, PROMPTS[5:7]) == reference[5:7]


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_an_engine_that_slept_serves_on_in_a_new_generation(
    engines: Engines, reference: list[list[int]], which: int
) -> None:
    wait_until_free(engines[0])
    before = [engine.ask("facts")["metrics"]["generation"] for engine in engines]
    hits = counts(engines[1])["remote_prefill_hits"]
    assert engines[which].ask("sleep") is None
    assert engines[which].ask("wake") is None
    assert run_pd(engines, PROMPTS[4:7]) == reference[4:7]
    after = [engine.ask("facts")["metrics"]["generation"] for engine in engines]
    assert after[which] > before[which]
    assert after[1 - which] == before[1 - which]
    assert counts(engines[1])["remote_prefill_hits"] == hits + 3
    assert counts(engines[1])["recomputed_tokens"] == 0


def test_prefill_refuses_to_sleep_while_it_holds_blocks_for_decode(
    engines: Engines, reference: list[list[int]]
) -> None:
    prefill, decode = engines
    transfer = hand_over(prefill, [PROMPTS[6]])
    assert "hold blocks of the KV cache" in prefill.ask("sleep")
    assert decode.generate([PROMPTS[6]], MAX_TOKENS, transfer)[0]["tokens"] == reference[6]


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_leases_and_transfers_are_ended_for_a_sleep_that_says_so(
    engines: Engines, reference: list[list[int]], which: int
) -> None:
    prefill, decode = engines
    wait_until_free(prefill)
    prompt = [20 + which, *PROMPTS[6][1:]]
    (transfer,) = hand_over(prefill, [prompt])
    if which == 1:
        decode.ask("submit", request_id="sleeps", prompt=prompt, max_tokens=4, transfer=copy.deepcopy(transfer))
    assert engines[which].ask("sleep", mode="abort_transfers") is None
    assert engines[which].ask("wake") is None
    if which == 1:
        decode.ask("abort", request_id="sleeps")  # or `LLM` would wait for a request that the sleep has ended
    assert decode.generate([prompt], MAX_TOKENS, [transfer])[0]["tokens"] == []
    wait_until_free(prefill)
    assert run_pd(engines, PROMPTS[4:7]) == reference[4:7]


def test_a_request_that_decode_never_asks_for_leaves_the_others_alone(
    engines: Engines, reference: list[list[int]]
) -> None:
    hand_over(engines[0], [PROMPTS[2]])
    assert run_pd(engines, PROMPTS[3:5]) == reference[3:5]
    assert engines[0].ask("facts")["metrics"]["held_requests"] == 1


def test_a_killed_prefill_engine_fails_its_requests_and_decode_serves_on(
    engines: Engines, reference: list[list[int]]
) -> None:
    """Last in this file: it ends the prefill engine."""
    prefill, decode = engines
    transfer = hand_over(prefill, [[12, *PROMPTS[6][1:]]])
    os.kill(prefill.process.pid, signal.SIGKILL)
    prefill.process.wait(30)
    assert decode.generate([[12, *PROMPTS[6][1:]]], MAX_TOKENS, transfer)[0]["tokens"] == []
    assert decode.generate([PROMPTS[6]], MAX_TOKENS)[0]["tokens"] == reference[6]
    assert decode.ask("facts")["metrics"]["counters"]["failed_peer_lost"] == 1


def test_decode_that_zeroes_what_it_received_gives_other_tokens(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The negative control, on a small random model."""
    folder, port = tmp_path_factory.mktemp("zero"), free_port()
    model = make_random_llama(folder / "model", "tiny")
    prompts = [[(17 * place + length) % vocabulary("tiny") for place in range(length)] for length in (40, 70)]
    control = {"PDKV_CORRUPT_RECEIVED_KV": "1"}
    over = {"transport": "nixl"}
    prefill = EngineProcess(model, folder / "prefill.log", **GROWABLE, **pdkv_connector("kv_producer", port, **over))
    decode = EngineProcess(
        model, folder / "decode.log", control, **GROWABLE, **pdkv_connector("kv_consumer", port, **over)
    )
    with running(prefill, decode):
        alone = [answer["tokens"] for answer in prefill.generate(prompts, MAX_TOKENS)]
        found = run_pd((prefill, decode), prompts)
    assert all(one != other for one, other in zip(alone, found, strict=True))


@pytest.mark.parametrize("prefill_verifies", [True, False])
def test_decode_that_is_to_verify_takes_verified_blocks_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, prefill_verifies: bool
) -> None:
    folder, port = tmp_path_factory.mktemp("verify"), free_port()
    model = make_random_llama(folder / "model", "tiny")
    prompts = [[(17 * place + length) % vocabulary("tiny") for place in range(length)] for length in (40, 70)]
    options = {**GROWABLE, "skip_tokenizer_init": True}
    verify = {"transport": "nixl", "pdkv_verify": True}
    on_prefill = verify if prefill_verifies else {"transport": "nixl"}
    prefill = EngineProcess(
        model, folder / "prefill.log", **options, **pdkv_connector("kv_producer", port, **on_prefill)
    )
    decode = EngineProcess(model, folder / "decode.log", **options, **pdkv_connector("kv_consumer", port, **verify))
    with prefill, decode:
        alone = [answer["tokens"] for answer in prefill.generate(prompts, MAX_TOKENS)]
        found = run_pd((prefill, decode), prompts)
        hits = counts(decode)["remote_prefill_hits"]
        (rank,) = decode.ask("facts")["metrics"]["transport"]["ranks"]
    assert rank["verify"] is True
    assert not {"checksum_failures", "rewritten"} & rank.keys()
    if prefill_verifies:
        assert (found, hits) == (alone, len(prompts))
        assert rank["bytes"] > 0
    else:
        assert found == [[], []]
        assert "the peer keeps no sums, which this side is to verify" in decode.log.read_text()
