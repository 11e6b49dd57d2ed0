"""The sweep against a launched engine, on the CPU: real requests, real peaks of the worker process."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError, HarnessError
from pdkv.harness.client import ask_all
from pdkv.harness.prompts import Prompt
from pdkv.launch.deployment import EngineDeployment
from pdkv.launch.settings import engine_settings
from pdkv.sizing.fit import Baseline, Point
from pdkv.sizing.watch import PrivatePeak

REQUEST_TIMEOUT_S = 600.0
#: Each load is sent this many times over, so that allocators meet it warm as well as cold.
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one length, so many at once. Text only."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int


def sweep_engine(
    engine: dict[str, Any], loads: Sequence[Load], *, log_dir: Path | None, say: Callable[[str], None]
) -> tuple[Baseline, tuple[Point, ...], dict[str, Any]]:
    """Start an engine, send it all loads one after the other, end it.

    Args:
        engine: settings by the launcher's names (:class:`pdkv.launch.settings.EngineSettings`).

    Returns:
        What sizing knew, a point for each load, and what the engine said of its cache.

    Raises:
        ConfigError: a setting is wrong, or the engine is not one on the CPU.
        LaunchError: the engine did not start or died.
        HarnessError: it did not answer, or has written no reading.
    """
    settings = engine_settings(**{"role": "prefill", "device": "cpu", **engine})
    if settings.device != "cpu":
        raise ConfigError("sweep watches an engine on the CPU; on CUDA use --torch-workload.")
    vocabulary = vocabulary_of(settings.model)
    began = time.monotonic()
    with EngineDeployment(settings, log_dir=log_dir, report=say) as deployment:
        ready_s = time.monotonic() - began
        worker = _only_worker(deployment.status())
        baseline = baseline_of(worker)
        points = tuple(_run(deployment.url, worker["pid"], load, vocabulary, say) for load in loads)
    return baseline, points, {**worker, "ready_s": ready_s}


def baseline_of(worker: dict[str, Any]) -> Baseline:
    """What sizing knew, from the status of a rank."""
    reading = worker.get("reading")
    if not reading:
        raise HarnessError(
            "the engine's status has no reading after warmup; its cache is a fixed one, so nothing was measured "
            f"({worker.get('fixed_because')})."
        )
    resident = reading["init_free_memory"] - reading["free_memory"] - worker["warmup_bytes"]
    return Baseline(resident, reading["transient_peak_bytes"])


def vocabulary_of(model: Path) -> int:
    """Number of token ids, from a model's config.json."""
    try:
        config = json.loads((model / "config.json").read_text())
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read vocab_size from {model / 'config.json'}: {error}") from error


def prompts_of(load: Load, vocabulary: int, seed: int) -> tuple[Prompt, ...]:
    """Random prompts, different in each round, so that nothing comes out of the prefix cache."""
    chance = random.Random(f"{seed} {load}")
    # No seed: with seeds of their own in a batch, vLLM 0.32's CPU worker dies ("CPU Generator does not use offset").
    body = {"max_tokens": load.output_tokens, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
    return tuple(
        Prompt(
            "/v1/completions",
            {
                "prompt": [chance.randrange(vocabulary) for _ in range(load.prompt_tokens)],
                "return_token_ids": True,
                **body,
            },
        )
        for _ in range(load.concurrency)
    )


def _run(url: str, pid: int, load: Load, vocabulary: int, say: Callable[[str], None]) -> Point:
    began = time.monotonic()
    with PrivatePeak(pid) as peak:
        for number in range(ROUNDS):
            prompts = prompts_of(load, vocabulary, number)
            asyncio.run(ask_all(url, prompts, concurrency=load.concurrency, timeout_s=REQUEST_TIMEOUT_S))
    seconds = time.monotonic() - began
    say(f"{load.concurrency} x {load.prompt_tokens} tokens: peak {peak.nbytes / 2**20:.0f} MiB in {seconds:.1f} s")
    return Point(load.prompt_tokens, load.output_tokens, load.concurrency, peak.nbytes, seconds)


def _only_worker(status: dict[str, Any]) -> dict[str, Any]:
    workers = status["workers"]
    if len(workers) != 1:
        raise HarnessError(f"sweep watches engines of one rank; this one has {len(workers)}.")
    worker: dict[str, Any] = workers[0]
    return worker


__all__ = ["Load", "baseline_of", "prompts_of", "sweep_engine", "vocabulary_of"]
