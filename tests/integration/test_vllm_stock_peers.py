"""A pdkv engine and a stock vLLM serve each other, both ways, and the leases of the stock one end too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ends_pair import ASK, LEASE_S, TIMES
from engine import GROWABLE, EngineProcess, nixl_connector, running

pytestmark = pytest.mark.vllm

LENGTHS = (1, 32, 33, 130)
PROMPTS = [[(11 * length + 5 * place) % 4000 + 100 for place in range(length)] for length in LENGTHS]
MAX_TOKENS = 8
_ids = itertools.count(1000, 100)


@pytest.fixture(scope="module", params=["Pull", "Push"])
def engines(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """A pdkv engine and a stock one, each of which prefills and decodes."""
    folder, extra = tmp_path_factory.mktemp("stock"), {"kv_connector_extra_config": TIMES}
    ours = EngineProcess(model, folder / "ours.log", **GROWABLE, **nixl_connector("kv_both", request.param, **extra))
    config = nixl_connector("kv_both", request.param, stock=True, **extra)
    stock = EngineProcess(model, folder / "stock.log", **config)
    with running(ours, stock):
        yield ours, stock


def run(prefill: EngineProcess, decode: EngineProcess) -> list[list[int]]:
    """Tokens of all prompts; stock push finds the halves of a request by its id, so that both have the same."""
    first_id = next(_ids)
    answers = prefill.generate(PROMPTS, 1, [dict(ASK)] * len(PROMPTS), first_id)
    transfer: list[Any] = [answer["transfer"] for answer in answers]
    return [answer["tokens"] for answer in decode.generate(PROMPTS, MAX_TOKENS, transfer, first_id)]


def test_a_stock_decode_takes_kv_from_pdkv_and_ends_its_leases(engines: tuple[EngineProcess, EngineProcess]) -> None:
    ours, stock = engines
    before = ours.ask("ends")["prefill"]["counters"].get("leases_ended_by_decode", 0)
    tokens = run(ours, stock)
    path = ["prefill", "counters", "leases_ended_by_decode"]
    wanted = before + len(PROMPTS)
    assert ours.ask("until", path=path, value=wanted, within_s=LEASE_S / 2)["found"] == wanted
    assert ours.ask("ends")["prefill"]["held_requests"] == 0
    assert tokens == [answer["tokens"] for answer in ours.generate(PROMPTS, MAX_TOKENS)]


def test_pdkv_decodes_what_a_stock_engine_has_prefilled(engines: tuple[EngineProcess, EngineProcess]) -> None:
    ours, stock = engines
    before = ours.ask("facts")["counts"]
    tokens = run(stock, ours)
    after = ours.ask("facts")["counts"]
    assert after["remote_prefill_hits"] > before["remote_prefill_hits"]
    assert after["failed_loads"] == before["failed_loads"]
    assert tokens == [answer["tokens"] for answer in stock.generate(PROMPTS, MAX_TOKENS)]


# A pull begins with what prefill has answered.
@pytest.mark.parametrize("engines", ["Push"], indirect=True)
def test_a_push_may_be_registered_before_prefill_has_seen_the_request(
    engines: tuple[EngineProcess, EngineProcess],
) -> None:
    """By whoever routes and names requests itself, with parameters of the stock form, which hold no seal of prefill."""
    for prefill, decode in (engines, engines[::-1]):
        first_id = next(_ids)
        (first,) = prefill.generate([[7, 8, 9]], 1, [dict(ASK)], first_id)
        known = {key: value for key, value in first["transfer"].items() if key != "pdkv"}
        decode.generate([[7, 8, 9]], 1, [first["transfer"]], first_id)
        early = {**known, "remote_request_id": str(first_id + 1), "remote_block_ids": None}
        decode.ask("submit", request_id=str(first_id + 1), prompt=PROMPTS[-1], max_tokens=MAX_TOKENS, transfer=early)
        assert decode.ask("outcome", request_id=str(first_id + 1), within_s=1) is None
        prefill.generate(PROMPTS[-1:], 1, [dict(ASK)], first_id + 1)
        outcome = decode.ask("outcome", request_id=str(first_id + 1), within_s=30)
        assert outcome is not None
        assert outcome["tokens"] == prefill.generate(PROMPTS[-1:], MAX_TOKENS)[0]["tokens"]


def test_a_stock_decode_that_never_asks_leaves_a_lease_that_runs_out(
    engines: tuple[EngineProcess, EngineProcess],
) -> None:
    ours, _ = engines
    before = ours.ask("ends")["prefill"]["counters"].get("leases_expired", 0)
    ours.generate(PROMPTS[:1], 1, [dict(ASK)])
    path = ["prefill", "counters", "leases_expired"]
    assert ours.ask("until", path=path, value=before + 1, within_s=2 * LEASE_S)["found"] == before + 1
