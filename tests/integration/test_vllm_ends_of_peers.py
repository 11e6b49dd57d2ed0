"""Engines that die, that do not fit, and decode engines that have too little room."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from ends_pair import BLOCK, HOLD_S, LEASE_S, MAX_TOKENS, TIMES, Pair, running_pair
from engine import GROWABLE, EngineProcess, nixl_connector

pytestmark = pytest.mark.vllm

KV_BYTES_PER_BLOCK = 30 * 3 * 32 * 2 * 64 * 4


def test_small_pools_misfits_and_dead_peers(model: Path, tmp_path: Path) -> None:
    """One pair for all of it, since each engine takes half a minute; the dead come last."""
    holding = {"pdkv_hold_s": HOLD_S}
    with running_pair(model, tmp_path, "Pull", holding, kv_cache_memory_bytes=24 * KV_BYTES_PER_BLOCK) as pair:
        requests_without_room_wait_and_release_prefill_when_their_client_leaves(pair)
        preempted_requests_read_their_kv_again_while_its_lease_is_held(pair)
        for other in ({"block_size": 64}, {"dtype": "bfloat16"}):
            a_misfit_recomputes_its_requests_and_disturbs_nobody(pair, model, tmp_path, other)
        a_decode_without_a_lease_computes_preempted_requests_and_a_dead_one_leaves_its_leases_to_run_out(
            pair, model, tmp_path
        )
        a_dead_prefill_fails_its_requests_and_no_others(pair)


def requests_without_room_wait_and_release_prefill_when_their_client_leaves(pair: Pair) -> None:
    large, waiting = pair.prompt(13 * BLOCK), pair.prompt(13 * BLOCK)
    for_waiting, for_large = pair.prefilled(waiting), pair.prefilled(large)
    first = pair.submitted(large, for_large, max_tokens=90)
    second = pair.submitted(waiting, for_waiting)
    assert pair.until("decode", "held_requests", value=2, timeout_s=20)  # one has arrived and is held, one waits
    pair.decode.ask("abort", request_id=second)
    assert pair.until("prefill", "held_requests", value=1)
    assert pair.outcome(first)["reason"] == "length"
    assert pair.both_are_free()


def preempted_requests_read_their_kv_again_while_its_lease_is_held(pair: Pair) -> None:
    prompts = [pair.prompt(9 * BLOCK) for _ in range(2)]
    transfers = [pair.prefilled(prompt) for prompt in prompts]
    before = pair.counts("decode").get("read_again", 0)
    ids = [pair.submitted(prompt, transfer, 120) for prompt, transfer in zip(prompts, transfers, strict=True)]
    found = [pair.outcome(request_id, 120) for request_id in ids]
    assert pair.counts("decode")["read_again"] > before
    assert pair.both_are_free()
    assert [outcome["tokens"][:MAX_TOKENS] for outcome in found] == [pair.alone(prompt) for prompt in prompts]
    assert {outcome["reason"] for outcome in found} == {"length"}


def preempted_requests_without_a_lease_are_computed_again_and_counted(pair: Pair) -> None:
    prompts = [pair.prompt(9 * BLOCK) for _ in range(2)]
    transfers = [pair.prefilled(prompt) for prompt in prompts]
    ids = [pair.submitted(prompt, transfer, 120) for prompt, transfer in zip(prompts, transfers, strict=True)]
    found = [pair.outcome(request_id, 120) for request_id in ids]
    assert {outcome["reason"] for outcome in found} == {"length"}
    counts = pair.counts("decode")
    assert counts["preempted_without_lease"] > 0
    assert counts.get("read_again", 0) == 0
    assert pair.decode.ask("facts")["counts"]["recomputed_tokens"] >= 9 * BLOCK - 1
    assert pair.both_are_free()
    assert [outcome["tokens"][:MAX_TOKENS] for outcome in found] == [pair.alone(prompt) for prompt in prompts]


def a_misfit_recomputes_its_requests_and_disturbs_nobody(
    pair: Pair, model: Path, folder: Path, option: dict[str, Any]
) -> None:
    config = nixl_connector("kv_consumer", kv_connector_extra_config=TIMES, kv_load_failure_policy="recompute")
    with EngineProcess(model, folder / "misfit.log", **{**GROWABLE, **option}, **config) as misfit:
        misfit.wait_ready()
        other = Pair(pair.prefill, misfit, "Pull")
        prompt, fitting = pair.prompt(2 * BLOCK), pair.prompt(2 * BLOCK)
        tokens = other.run(prompt)
        counts: dict[str, Any] = other.counts("decode")
        assert counts["recomputed"] == counts["failed_incompatible"] == 1
        assert tokens == other.alone(prompt)
        assert pair.run(fitting) == pair.alone(fitting)
    assert pair.until("prefill", "held_requests", value=0, timeout_s=2 * LEASE_S)


def a_decode_without_a_lease_computes_preempted_requests_and_a_dead_one_leaves_its_leases_to_run_out(
    pair: Pair, model: Path, folder: Path
) -> None:
    # Without a prefix cache, which would still have the prompts of preempted requests.
    small = {"kv_cache_memory_bytes": 24 * KV_BYTES_PER_BLOCK, "enable_prefix_caching": False}
    config = nixl_connector("kv_consumer", kv_connector_extra_config=TIMES)
    with EngineProcess(model, folder / "dies.log", **GROWABLE, **small, **config) as dies:
        dies.wait_ready()
        other = Pair(pair.prefill, dies, "Pull")
        preempted_requests_without_a_lease_are_computed_again_and_counted(other)
        prompt = pair.prompt(2 * BLOCK)
        transfer = other.prefilled(prompt)
        dies.ask("hold_transfers", held=True)
        other.submitted(prompt, transfer)
        assert dies.ask("until", path=["transfers"], value=1, within_s=10)["found"] == 1
        dies.process.send_signal(signal.SIGKILL)
        dies.process.wait(10)
    assert pair.until("prefill", "held_requests", value=0, timeout_s=2 * LEASE_S)
    fitting = pair.prompt(2 * BLOCK)
    assert pair.run(fitting) == pair.alone(fitting)


def a_dead_prefill_fails_its_requests_and_no_others(pair: Pair) -> None:
    prompt, own = pair.prompt(2 * BLOCK), pair.prompt(2 * BLOCK)
    transfer = pair.prefilled(prompt)
    pair.prefill.process.send_signal(signal.SIGKILL)
    pair.prefill.process.wait(10)
    assert pair.outcome(pair.submitted(prompt, transfer))["reason"] == "error"
    assert pair.until("decode", "held_requests", value=0)
    assert len(pair.alone(own)) > 0
