"""The two sides of a comparison when the harness starts them itself.

First one stock vLLM, alone; then prefill, decode and proxy. One after the other needs the memory and the cores of the
larger side only, and a reference cannot be disturbed by what it is to judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pdkv.harness.client import Completion, ask_all
from pdkv.harness.prompts import Prompt
from pdkv.harness.status import EngineFacts, collect, counters
from pdkv.launch.deployment import PDDeployment, StockEngine
from pdkv.launch.settings import PDSettings

CORRUPT_VARIABLE = "PDKV_CORRUPT_RECEIVED_KV"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How an endpoint is asked: requests at once, and seconds each may take."""

    concurrency: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engines that the harness starts.

    Attributes:
        model: a local folder.
        connector: a name in the entry-point group ``pdkv.connectors``.
        dtype: float32 unless told otherwise: in 16 bits two logits can tie, and then equality is chance.
        kv_bytes: budget of a final KV cache in bytes.
        prefill_kv_bytes: the same for prefill alone; None is `kv_bytes`. The sides need not be equal.
        engine_memory: bytes that prefill and decode may each use in all. Their caches are then what warmup leaves of
            it, and `kv_bytes` is the reference's alone.
        log_dir: folder for the engines' logs and status files; None makes one and removes it after a clean end.
        ready_timeout_s: seconds until an engine must be ready.
        decode_prefix_caching: whether decode may keep prompts. Off unless asked for, so that every block of every
            prompt travels: few-shot prompts share most of their blocks, and only the first would be transferred whole.
        corrupt_received_kv: the negative control; decode overwrites what it receives with zeros.
        extra_args: given to every vLLM.
    """

    model: Path
    connector: str
    dtype: str
    kv_bytes: int
    prefill_kv_bytes: int | None
    engine_memory: int | None
    max_model_len: int
    block_size: int
    log_dir: Path | None
    ready_timeout_s: float
    decode_prefix_caching: bool = False
    corrupt_received_kv: bool = False
    extra_args: tuple[str, ...] = ()

    def common(self) -> dict[str, Any]:
        """What all engines share, under the launcher's names."""
        return {
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "block_size": self.block_size,
        }

    def budget(self, kv_bytes: int | None = None) -> dict[str, Any]:
        """What bounds the KV cache of prefill or decode, under the launcher's names."""
        if self.engine_memory is not None:
            return {"engine_memory": self.engine_memory}
        return {"kv_bytes": kv_bytes or self.kv_bytes}


def answers(url: str, prompts: Sequence[Prompt], options: RequestOptions, label: str) -> tuple[Completion, ...]:
    """All answers of an endpoint, with a progress bar on standard error."""
    with tqdm(total=len(prompts), desc=label, unit="problem") as bar:
        return asyncio.run(
            ask_all(
                url, prompts, concurrency=options.concurrency, timeout_s=options.timeout_s, done=lambda: bar.update(1)
            )
        )


def run_reference(
    prompts: Sequence[Prompt], engine: EngineOptions, requests: RequestOptions, say: Say
) -> tuple[Completion, ...]:
    """Start one stock vLLM, ask it everything, end it.

    Raises:
        ConfigError: a setting is wrong; nothing was started.
        LaunchError: the engine did not start or died.
        HarnessError: it did not answer.
    """
    deployment = StockEngine(
        engine.model,
        ready_timeout_s=engine.ready_timeout_s,
        log_dir=engine.log_dir,
        report=say,
        kv_bytes=engine.kv_bytes,
        extra_args=engine.extra_args,
        **engine.common(),
    )
    with deployment:
        return answers(deployment.url, prompts, requests, "reference")


def build_candidate(engine: EngineOptions, say: Say) -> PDDeployment:
    """Prefill, decode and proxy, not started yet.

    Raises:
        ConfigError: a setting is wrong, for instance no connector has that name.
    """
    _remove_old_status(engine.log_dir)
    caching = () if engine.decode_prefix_caching else ("--no-enable-prefix-caching",)
    settings = PDSettings.build(
        engine.model,
        connector=engine.connector,
        ready_timeout_s=engine.ready_timeout_s,
        log_dir=engine.log_dir,
        prefill={**engine.budget(engine.prefill_kv_bytes), "extra_args": engine.extra_args},
        decode={
            **engine.budget(),
            "extra_args": (*engine.extra_args, *caching),
            "extra_env": {CORRUPT_VARIABLE: "1"} if engine.corrupt_received_kv else {},
        },
        **engine.common(),
    )
    return PDDeployment(settings, report=say)


def run_candidate(
    deployment: PDDeployment, prompts: Sequence[Prompt], requests: RequestOptions
) -> tuple[tuple[Completion, ...], EngineFacts]:
    """Start a P/D deployment, ask its proxy everything, read what the engines say of themselves, end it.

    Raises:
        LaunchError: a process did not start or died.
        HarnessError: the proxy did not answer, or an engine has written no status.
    """
    with deployment:
        before = counters(deployment.status("decode"))
        completions = answers(deployment.proxy_url, prompts, requests, "prefill + decode")
        return completions, collect(deployment.status, before, len(prompts))


def _remove_old_status(log_dir: Path | None) -> None:
    """Status files of an earlier run must not pass for this one's, should an engine fail to write any."""
    if log_dir is not None:
        for path in (log_dir / "status").glob("*/*.json"):
            path.unlink()
