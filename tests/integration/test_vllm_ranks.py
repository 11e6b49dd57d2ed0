"""Tensor parallelism on the CPU: two ranks, one with less memory, and prefill with another number of ranks or tokens
in a block."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import GROWABLE, EngineProcess, free_port, nixl_connector, pdkv_connector
from random_llama import make_random_llama, vocabulary

pytestmark = pytest.mark.vllm

BALLAST_BYTES = 512 << 20
_random = random.Random(17)
PROMPTS = [[_random.randrange(10, vocabulary("tiny")) for _ in range(length)] for length in (20, 64, 130, 300)]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 32 << 20}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("tiny"), "tiny")


def workers(status: Path) -> list[dict[str, Any]]:
    return [json.loads((status / f"worker-rank{rank}.json").read_text()) for rank in range(2)]


def test_both_ranks_commit_what_the_poorer_one_has_room_for(tiny: Path, tmp_path: Path) -> None:
    blocks = {}
    for name, ballast in (("even", 0), ("uneven", BALLAST_BYTES)):
        environment = {
            **ENVIRONMENT,
            "PDKV_STATUS_DIR": str(tmp_path / name),
            "PDKV_TEST_BALLAST": f"1:{ballast}",
            "PDKV_ENGINE_MEMORY": str(3 << 30),
            "PDKV_CAPACITY_BLOCKS": "50000",
        }
        options = {**OPTIONS, **TWO_RANKS, "kv_cache_memory_bytes": None}
        options["worker_cls"] = "ballast_workers.BallastCPUWorker"
        with EngineProcess(tiny, tmp_path / f"{name}.log", environment, **options) as engine:
            assert len(engine.generate(PROMPTS, 4)) == len(PROMPTS)
            blocks[name] = engine.ask("pool_blocks")
        said = workers(tmp_path / name)
        assert [rank["final_blocks"] for rank in said] == [blocks[name]] * 2
        assert said[0]["warmup_blocks"] == said[1]["warmup_blocks"]
    block_bytes = said[0]["bytes_committed"] / said[0]["final_blocks"]
    assert blocks["even"] - blocks["uneven"] == pytest.approx(BALLAST_BYTES / block_bytes, rel=0.2)
    assert f"Another rank has room for {blocks['uneven']} blocks only" in (tmp_path / "uneven.log").read_text()


def test_prefill_with_one_rank_feeds_decode_with_two(tiny: Path, tmp_path: Path) -> None:
    with EngineProcess(tiny, tmp_path / "stock.log", **OPTIONS, **TWO_RANKS) as stock:
        expected = [answer["tokens"] for answer in stock.generate(PROMPTS)]
    decode_options = {**OPTIONS, **TWO_RANKS, **GROWABLE, **nixl_connector("kv_consumer")}
    with (
        EngineProcess(tiny, tmp_path / "p.log", **OPTIONS, **GROWABLE, **nixl_connector("kv_producer")) as prefill,
        EngineProcess(tiny, tmp_path / "d.log", {"PDKV_STATUS_DIR": str(tmp_path / "d")}, **decode_options) as decode,
    ):
        # Prefill keeps blocks for 30 s without hearing of anybody who wants them; decode may start for longer.
        decode.wait_ready()
        ask = {"do_remote_decode": True, "do_remote_prefill": False}
        answers = prefill.generate(PROMPTS, 1, [ask] * len(PROMPTS))
        found = decode.generate(PROMPTS, 16, [answer["transfer"] for answer in answers])
        prefill_blocks = prefill.ask("pool_blocks")
    assert [answer["tokens"] for answer in found] == expected
    counts = json.loads((tmp_path / "d" / "scheduler.json").read_text())
    assert counts["remote_prefill_hits"] == len(PROMPTS)
    assert counts["recomputed_tokens"] == counts["failed_loads"] == 0
    for rank in workers(tmp_path / "d"):
        assert rank["chunks_per_segment"] == 1
        assert rank["connector_created_after_extend"]
        assert rank["final_blocks"] != prefill_blocks


Pair = tuple[EngineProcess, EngineProcess]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where the two engines of `pair` write what they say of themselves."""
    return tmp_path_factory.mktemp("p"), tmp_path_factory.mktemp("d")


@pytest.fixture(scope="module")
def pair(tiny: Path, folders: tuple[Path, Path]) -> Iterator[Pair]:
    """A prefill and a decode engine of two ranks each, which may sleep."""
    prefill, decode = (
        EngineProcess(
            tiny,
            folder / "log",
            {"PDKV_STATUS_DIR": str(folder), "PDKV_SLEEP": "1"},
            **{**OPTIONS, **TWO_RANKS, **GROWABLE, **nixl_connector(role)},
        )
        for role, folder in zip(("kv_producer", "kv_consumer"), folders, strict=True)
    )
    with prefill, decode:
        prefill.wait_ready()
        decode.wait_ready()
        yield prefill, decode


def run_pd(pair: Pair, prompts: list[list[int]]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Each prompt through P, then D: what P said of its KV, and the tokens of D."""
    answers = pair[0].generate(prompts, 1, [{"do_remote_decode": True, "do_remote_prefill": False} for _ in prompts])
    transfers = [answer["transfer"] for answer in answers]
    return transfers, [answer["tokens"] for answer in pair[1].generate(prompts, 16, transfers)]


def test_each_rank_of_decode_ends_its_lease_on_the_same_rank_of_prefill(pair: Pair, folders: tuple[Path, Path]) -> None:
    prefill, decode = pair
    transfers, tokens = run_pd(pair, PROMPTS)
    assert [len(transfer["pdkv"]["ranks"]) for transfer in transfers] == [2] * len(PROMPTS)
    assert tokens == [answer["tokens"] for answer in prefill.generate(PROMPTS, 16)]
    decode.ask("submit", request_id="again", prompt=PROMPTS[1], max_tokens=4, transfer=dict(transfers[1]))
    assert decode.ask("outcome", request_id="again", within_s=60)["reason"] == "error"
    prefill.generate(PROMPTS[:1], 1)  # steps, in which what has ended is said
    for rank in (0, 1):
        of_prefill, of_decode = (workers(folder)[rank]["ends"] for folder in folders)
        assert of_prefill["prefill"]["held_requests"] == of_decode["decode"]["held_requests"] == 0
        assert of_prefill["prefill"]["counters"]["leases_ended_by_decode"] == len(PROMPTS)
        assert of_decode["decode"]["counters"]["loaded"] == len(PROMPTS)


def test_both_ranks_of_an_engine_sleep_and_wake_and_their_peers_meet_them_again(
    pair: Pair, folders: tuple[Path, Path]
) -> None:
    prompts = [prompt[::-1] for prompt in PROMPTS]  # of which no prefix cache knows anything
    for engine, folder in zip(pair, folders, strict=True):
        awake = workers(folder)
        assert engine.ask("sleep") is None
        for before, after in zip(awake, workers(folder), strict=True):
            assert (after["bytes_committed"], after["given_back"]) == (0, before["bytes_committed"])
        assert engine.ask("wake") is None
        for before, after in zip(awake, workers(folder), strict=True):
            assert after["bytes_committed"] == before["bytes_committed"]
            assert after["registration"] > before["registration"]
    _, tokens = run_pd(pair, prompts)
    assert tokens == [answer["tokens"] for answer in pair[0].generate(prompts, 16)]
    for rank in (0, 1):
        assert workers(folders[1])[rank]["ends"]["decode"]["counters"]["loaded"] == 2 * len(PROMPTS)


#: For each engine of `unlike` prompts of lengths around the borders of blocks of 32 and 64 tokens, of which the other's
#: prefix cache knows nothing. The last two begin alike for 110 tokens.
UNLIKE: dict[str, list[list[int]]] = {}
for _first, _name in enumerate(("one", "two")):
    UNLIKE[_name] = [
        [_first, *(_random.randrange(10, 500) for _ in range(n))] for n in (0, 31, 32, 63, 64, 95, 129, 299)
    ]
    UNLIKE[_name].append([*UNLIKE[_name][-1][:110], *(_random.randrange(10, 500) for _ in range(60))])


@pytest.fixture(scope="module")
def unlike_reference(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """The tokens of `UNLIKE` by a stock vLLM."""
    with EngineProcess(tiny, tmp_path_factory.mktemp("stock") / "log", **OPTIONS) as stock:
        return {name: [answer["tokens"] for answer in stock.generate(UNLIKE[name])] for name in UNLIKE}


@pytest.fixture(scope="module")
def unlike(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, unlike_reference: object
) -> Iterator[tuple[dict[str, EngineProcess], dict[str, Path]]]:
    """By name, with the folder of its status: "one" rank with blocks of 32 tokens, and "two" ranks with blocks of 64.

    Both prefill and decode.
    """
    ports, folders = [free_port(), free_port()], {name: tmp_path_factory.mktemp(name) for name in ("one", "two")}
    kinds: list[dict[str, Any]] = [{"block_size": 32}, {"block_size": 64, **TWO_RANKS}]
    engines = {
        name: EngineProcess(
            tiny,
            folders[name] / "log",
            {"PDKV_STATUS_DIR": str(folders[name])},
            **{**OPTIONS, **GROWABLE, **kind, **pdkv_connector("kv_both", peer, own=own, transport="ipc")},
        )
        for name, kind, own, peer in zip(folders, kinds, ports, ports[::-1], strict=True)
    }
    with engines["one"], engines["two"]:
        for engine in engines.values():
            engine.wait_ready()
        yield engines, folders


@pytest.mark.parametrize(("prefill", "decode"), [("one", "two"), ("two", "one")])
def test_pdkv_converts_between_numbers_of_ranks_and_tokens_in_a_block(
    unlike: Any, unlike_reference: dict[str, list[list[int]]], prefill: str, decode: str
) -> None:
    engines, folders = unlike
    pair, prompts, expected = (engines[prefill], engines[decode]), UNLIKE[prefill], unlike_reference[prefill]

    assert run_pd(pair, prompts[:-1])[1] == expected[:-1]
    before = json.loads((folders[decode] / "scheduler.json").read_text())
    assert before["remote_prefill_hits"] == len(prompts) - 1
    # Decode has 96 of these tokens, or 64: whole blocks of its own, not always of prefill's.
    assert run_pd(pair, prompts[-1:])[1] == expected[-1:]
    after = json.loads((folders[decode] / "scheduler.json").read_text())
    cached = 110 // (32 if decode == "one" else 64) * (32 if decode == "one" else 64)
    assert after["remote_tokens"] - before["remote_tokens"] == len(prompts[-1]) - cached
    assert after["recomputed_tokens"] == after["failed_loads"] == 0

    engines[decode].ask("zero_received", on=True)
    unknown = [[7, *prompt[1:]] for prompt in prompts[4:8]]
    found = run_pd(pair, unknown)[1]
    engines[decode].ask("zero_received", on=False)
    alone = [answer["tokens"] for answer in engines[prefill].generate(unknown, 16)]
    assert all(one != other for one, other in zip(alone, found, strict=True))
