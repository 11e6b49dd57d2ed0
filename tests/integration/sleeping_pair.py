"""A prefill and a decode engine of vLLM that may sleep: what tests ask of them."""

from __future__ import annotations

import itertools
import time
from typing import Any

from engine import EngineProcess, nixl_connector

MAX_TOKENS = 10
LENGTHS = (31, 64, 100)
PROMPTS = [[(11 * length + 17 * place) % 4000 + 100 for place in range(length)] for length in LENGTHS]
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
#: More than any host has times the largest layer, so that every weight update is short of memory.
ENVIRONMENT = {"PDKV_SLEEP": "1", "PDKV_SIZING_WEIGHT_UPDATE_FACTOR": "1000000"}

Engines = tuple[EngineProcess, EngineProcess]
_ids = itertools.count(1000, 100)


def new_ids() -> int:
    """The first of a hundred request ids that no other prompts have."""
    return next(_ids)


def connector(role: str, mode: str) -> dict[str, Any]:
    """With leases of a few seconds, so that tests which wait for one to end take no longer."""
    options = nixl_connector(role, mode)
    options["kv_transfer_config"]["kv_connector_extra_config"] = {"kv_lease_duration": 6}
    return options


def prefill_only(prefill: EngineProcess, prompts: list[list[int]], first_id: int) -> list[Any]:
    return [answer["transfer"] for answer in prefill.generate(prompts, 1, [ASK] * len(prompts), first_id)]


def run_pd(engines: Engines, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Each prompt through P, then D, under the same request id; the tokens of D."""
    first_id = new_ids()
    transfer = prefill_only(engines[0], prompts, first_id)
    return [answer["tokens"] for answer in engines[1].generate(prompts, MAX_TOKENS, transfer, first_id)]


def require_remote(decode: EngineProcess, before: dict[str, int]) -> None:
    """All requests since `before` loaded their KV from prefill."""
    after = decode.ask("facts")["counts"]
    assert after["remote_prefill_hits"] - before["remote_prefill_hits"] == after["requests"] - before["requests"]
    assert after["recomputed_tokens"] == before["recomputed_tokens"]
    assert after["failed_loads"] == before["failed_loads"]


def wait_for(engine: EngineProcess, what: str, wanted: Any) -> None:
    """Ask until the answer is as wanted; each question lets the engine step."""
    deadline = time.monotonic() + 60
    while (found := engine.ask(what)) != wanted:
        assert time.monotonic() < deadline, f"{what} is not {wanted!r}, but {found!r}"


def wait_for_holders(engine: EngineProcess) -> None:
    """Until some request has blocks that a transfer may touch."""
    deadline = time.monotonic() + 60
    while not engine.ask("held"):
        assert time.monotonic() < deadline, "no request holds blocks"
