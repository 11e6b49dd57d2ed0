"""A stock decode engine that knows nothing of sleep, and repeats old requests, beside a prefill engine that sleeps.

Over tcp, where the owner of memory reads it on behalf of its peer: a stock prefill engine dies of it there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import GROWABLE, EngineProcess, nixl_connector, running
from sleeping_pair import ASK, MAX_TOKENS, PROMPTS, wait_for

pytestmark = pytest.mark.vllm

#: In no prefix cache, and as long as the prompts whose transfer parameters are used again.
OTHERS = [[token % 3000 + 777 for token in prompt] for prompt in PROMPTS]
Engines = tuple[EngineProcess, EngineProcess]
_ids = itertools.count(1000, 100)


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """pdkv's prefill, and vLLM's own decode."""
    folder, tcp = tmp_path_factory.mktemp("hostile"), {"UCX_TLS": "tcp"}
    prefill = EngineProcess(
        model, folder / "prefill.log", {**tcp, "PDKV_SLEEP": "1"}, **GROWABLE, **nixl_connector("kv_producer")
    )
    decode = EngineProcess(model, folder / "stock.log", tcp, **nixl_connector("kv_consumer", stock=True))
    with running(prefill, decode):
        yield prefill, decode


@pytest.fixture(scope="module")
def expected(engines: Engines) -> list[list[int]]:
    """Tokens of the prefill engine by itself."""
    return [answer["tokens"] for answer in engines[0].generate(PROMPTS, MAX_TOKENS)]


def run_pd(engines: Engines) -> tuple[list[Any], list[Any]]:
    """Answers of decode, and the transfer parameters that it was given."""
    prefill, decode = engines
    first_id = next(_ids)
    transfer = [a["transfer"] for a in prefill.generate(PROMPTS, 1, [ASK] * len(PROMPTS), first_id)]
    return decode.generate(PROMPTS, MAX_TOKENS, transfer, first_id), transfer


def tokens(answers: list[Any]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def test_pull_works_with_a_stock_decode_engine(engines: Engines, expected: list[list[int]]) -> None:
    assert tokens(run_pd(engines)[0]) == expected


def test_a_read_while_prefill_sleeps_fails_on_decode_and_kills_nobody(
    engines: Engines, expected: list[list[int]]
) -> None:
    prefill, decode = engines
    answers, old = run_pd(engines)
    assert tokens(answers) == expected
    wait_for(prefill, "held", [])
    assert prefill.ask("sleep") is None
    for _ in range(2):
        assert {answer["finish"] for answer in decode.generate(OTHERS, MAX_TOKENS, old, next(_ids))} == {"error"}
    assert prefill.process.poll() is None
    assert prefill.ask("wake") is None
    assert tokens(prefill.generate(PROMPTS, MAX_TOKENS)) == expected


def test_an_old_request_repeated_after_prefill_woke_kills_nobody(engines: Engines, expected: list[list[int]]) -> None:
    prefill, decode = engines
    _, old = run_pd(engines)
    wait_for(prefill, "held", [])
    assert prefill.ask("sleep") is None
    assert prefill.ask("wake") is None
    decode.generate(OTHERS, MAX_TOKENS, old, next(_ids))
    assert prefill.process.poll() is None
    assert tokens(prefill.generate(PROMPTS, MAX_TOKENS)) == expected


def test_a_stock_decode_engine_comes_back_to_a_prefill_engine_that_slept(
    engines: Engines, expected: list[list[int]]
) -> None:
    prefill, _ = engines
    for _ in range(2):
        wait_for(prefill, "held", [])
        assert prefill.ask("sleep") is None
        assert prefill.ask("wake") is None
        assert tokens(run_pd(engines)[0]) == expected
