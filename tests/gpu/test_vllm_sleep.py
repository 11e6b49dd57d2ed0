"""Sleep and wake of real vLLM engines on one card: prefill and decode, pull and push, graphs on decode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from engine import EngineProcess

from gpu.test_vllm_pd import GRAPHS, GROWABLE, INVARIANT, MAX_TOKENS, OPTIONS, PROMPTS, V2, connector

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.gpu

KV_BYTES = 512 << 20
CASE = {"dtype": "bfloat16", **GRAPHS, "enforce_eager": False, "kv_cache_memory_bytes": KV_BYTES}
SLEEP = {"enable_sleep_mode": True, "sleep_mode_backend": "pdkv"}
ENVIRONMENT = {**INVARIANT, **V2}
_ids = itertools.count(1000, 100)


@pytest.fixture
def start(launch: Callable[..., EngineProcess]) -> Callable[..., EngineProcess]:
    """Start an engine with this file's options."""

    def with_options(name: str, environment: dict[str, str] | None = None, **options: Any) -> EngineProcess:
        return launch(name, {**ENVIRONMENT, **(environment or {})}, **{**OPTIONS, **CASE, **options})

    return with_options


def pd_connector(role: str, mode: str, *, stock: bool = False) -> dict[str, Any]:
    config = connector(role)
    config["kv_transfer_config"]["kv_connector"] = f"{'' if stock else 'Pdkv'}Nixl{mode}Connector"
    if stock:
        del config["kv_transfer_config"]["kv_connector_module_path"]
    return config


def run_pd(prefill: EngineProcess, decode: EngineProcess) -> tuple[list[list[int]], list[Any], int]:
    """All prompts through P, then D, under the same ids; D's tokens, the transfer parameters, the first id."""
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    first_id = next(_ids)
    transfer = [answer["transfer"] for answer in prefill.generate(PROMPTS, 1, [ask] * len(PROMPTS), first_id)]
    tokens = [answer["tokens"] for answer in decode.generate(PROMPTS, MAX_TOKENS, transfer, first_id)]
    return tokens, transfer, first_id


def free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info(0)[0])


def wait_until_nobody_holds(engine: EngineProcess) -> None:
    for _ in range(20000):
        if not engine.ask("held"):
            return
    raise AssertionError(f"requests still hold blocks: {engine.ask('held')}")


@pytest.mark.parametrize("mode", ["Pull", "Push"])
def test_prefill_and_decode_sleep_between_requests_and_the_tokens_stay_those_of_a_stock_engine(
    mode: str, start: Callable[..., EngineProcess], record: Callable[..., None]
) -> None:
    stock = start("stock")
    prefill = start("prefill", **GROWABLE, **SLEEP, **pd_connector("kv_producer", mode))
    decode = start("decode", **GROWABLE, **SLEEP, **pd_connector("kv_consumer", mode))
    expected = [answer["tokens"] for answer in stock.generate(PROMPTS, MAX_TOKENS)]
    stock.close()
    assert run_pd(prefill, decode)[0] == expected
    captures = decode.ask("graphs")["captures"]
    for name, engine in (("prefill", prefill), ("decode", decode)):
        wait_until_nobody_holds(prefill)
        before, generation = free_bytes(), engine.ask("sleeping")["generation"]
        physical = engine.ask("sleeping")["physical_bytes"]
        assert engine.ask("sleep") is None
        asleep = free_bytes()
        assert engine.ask("sleeping")["agent"] is None
        assert engine.ask("wake") is None
        awake = free_bytes()
        woken = engine.ask("sleeping")
        assert woken["generation"] > generation
        assert run_pd(prefill, decode)[0] == expected
        record(
            "vllm-sleep", mode=mode, who=name, free_before=before, free_asleep=asleep, free_awake=awake,
            kv_bytes=physical, times_s=engine.ask("sleep_times"),
        )  # fmt: skip
        assert asleep - before >= physical
        assert awake <= asleep - physical + (64 << 20)
    assert decode.ask("facts")["counts"]["recomputed_tokens"] == 0
    assert decode.ask("graphs")["captures"] == captures, "graphs captured before the sleep serve after it"
    if mode == "Pull":
        a_sleep_that_says_so_ends_leases(prefill, decode)
        record("vllm-sleep", mode=mode, case="leases ended by a sleep, and refused afterwards")


def a_sleep_that_says_so_ends_leases(prefill: EngineProcess, decode: EngineProcess) -> None:
    """And what was leased is refused afterwards; other requests go on as before."""
    expected, first_id = run_pd(prefill, decode)[0], next(_ids)
    wait_until_nobody_holds(prefill)
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    leased = [answer["transfer"] for answer in prefill.generate(PROMPTS[-1:], 1, [ask], first_id)]
    assert "LeasesHeldError" in prefill.ask("sleep")
    assert prefill.ask("sleep", mode="abort_transfers") is None
    assert prefill.ask("sleeping")["physical_bytes"] == 0
    assert prefill.ask("wake") is None
    assert decode.generate(PROMPTS[-1:], MAX_TOKENS, leased, first_id)[0]["finish"] == "error"
    assert run_pd(prefill, decode)[0] == expected


def test_a_decode_engine_that_repeats_an_old_request_while_prefill_sleeps_kills_nobody(
    start: Callable[..., EngineProcess], record: Callable[..., None]
) -> None:
    prefill = start("prefill", **GROWABLE, **SLEEP, **pd_connector("kv_producer", "Pull"))
    hostile = start("hostile", **pd_connector("kv_consumer", "Pull", stock=True))
    expected, old, _ = run_pd(prefill, hostile)
    wait_until_nobody_holds(prefill)
    assert prefill.ask("sleep") is None
    other = [[(3 * token + 11) % 900 + 10 for token in prompt] for prompt in PROMPTS]
    finishes = {answer["finish"] for answer in hostile.generate(other, MAX_TOKENS, old, next(_ids))}
    assert prefill.process.poll() is None
    assert prefill.ask("wake") is None
    hostile.generate(other, MAX_TOKENS, old, next(_ids))
    assert [answer["tokens"] for answer in prefill.generate(PROMPTS, MAX_TOKENS)] == expected
    record("vllm-sleep", case="hostile decode replays", finishes=sorted(finishes), prefill_lives=True)


def test_a_weight_update_that_is_short_of_memory_gets_the_caches(
    start: Callable[..., EngineProcess], record: Callable[..., None]
) -> None:
    short = {"PDKV_SIZING_WEIGHT_UPDATE_FACTOR": "1000000"}
    prefill = start("prefill", short, **GROWABLE, **SLEEP, **pd_connector("kv_producer", "Pull"))
    decode = start("decode", short, **GROWABLE, **SLEEP, **pd_connector("kv_consumer", "Pull"))
    expected = run_pd(prefill, decode)[0]
    wait_until_nobody_holds(prefill)
    for engine in (prefill, decode):
        generation = engine.ask("sleeping")["generation"]
        assert engine.ask("reload_weights") is None
        assert engine.ask("sleeping")["generation"] > generation
    found = run_pd(prefill, decode)[0]
    record("vllm-sleep", case="weight update", equal=f"{sum(a == b for a, b in zip(expected, found, strict=True))}")
    assert found == expected
