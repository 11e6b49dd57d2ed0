"""The same memory for an engine, stock vLLM's share of it against pdkv's measured size, on the CPU.

    python benchmarks/sizing.py [--model DIR] [--budget 3GiB] [--margin 64MiB] [--json FILE]

Stock vLLM gets 0.92 of the budget, as it would of a card. pdkv gets the budget less a margin: on a card it leaves one
by itself, but on a host its own margin guards the host's memory, not this budget. Each is started on its own and gets
the workload of `python -m pdkv.sizing sweep`. Printed for each: tokens of KV, seconds until it serves, the most that
its worker used of the budget, KV cache included, and the requests answered. A host does not enforce a budget; an engine
that went over it would have run out of memory on a card.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from _report import format_nbytes, headline, output_file, table, write_json

from pdkv.errors import HarnessError, PdkvError
from pdkv.harness.client import ask_all
from pdkv.launch.deployment import EngineDeployment, StockEngine
from pdkv.launch.settings import engine_settings
from pdkv.launch.sizes import parse_nbytes
from pdkv.sizing.engine_sweep import REQUEST_TIMEOUT_S, Load, prompts_of, vocabulary_of
from pdkv.sizing.watch import PrivatePeak

DEFAULT_MODEL = Path("build/models/smollm2-135m-instruct")
FIXED_UTILIZATION = 0.92
LOADS = tuple(Load(length, 16, number) for number in (1, 4) for length in (32, 256, 900))
COMMON: dict[str, Any] = {"dtype": "float32", "block_size": 32, "max_model_len": 1024, "device": "cpu"}


@dataclass(frozen=True)
class Result:
    """One side. Sizes in bytes; `used_bytes` is the highest memory of its worker, KV cache included."""

    name: str
    kv_tokens: int
    kv_bytes: int
    start_s: float
    used_bytes: int
    budget_bytes: int
    answered: int
    asked: int


def node_bytes() -> int:
    """Memory of the node as vLLM counts it, by which its utilization is a share."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    return int(get_memory_node_info(get_allowed_cpu_list()[0].numa_node).total_memory)


def measure(name: str, deployment: StockEngine | EngineDeployment, model: Path, budget: int) -> Result:
    """Start it, run the workload, end it."""
    began = time.monotonic()
    with deployment:
        start_s = time.monotonic() - began
        role = deployment.settings.role
        tokens, kv_bytes = cache_of(deployment.log_path(role).read_text(errors="replace"))
        worker = max(
            psutil.Process(deployment.pid(role)).children(recursive=True), key=lambda child: child.memory_info().rss
        )
        vocabulary, answered, asked = vocabulary_of(model), 0, 0
        with PrivatePeak(worker.pid) as peak:
            for load in LOADS:
                prompts = prompts_of(load, vocabulary, 0)
                asked += len(prompts)
                replies = ask_all(deployment.url, prompts, concurrency=load.concurrency, timeout_s=REQUEST_TIMEOUT_S)
                answered += len(asyncio.run(replies))
        # A stock cache is private memory, resident from its allocation; a growable one is shared and not in the peak.
        used = peak.nbytes + (0 if isinstance(deployment, StockEngine) else kv_bytes)
    return Result(name, tokens, kv_bytes, start_s, used, budget, answered, asked)


def cache_of(log: str) -> tuple[int, int]:
    """Tokens and bytes of the final KV cache, from an engine's log."""
    tokens = re.findall(r"KV cache size: ([\d,]+) tokens", log)
    if not tokens:
        raise HarnessError("the engine's log does not say how many tokens its KV cache holds.")
    grown = re.findall(r"'bytes_committed': (\d+)", log)
    stock = re.findall(r"Auto set \(([\d.]+)/", log)
    nbytes = int(grown[-1]) if grown else int(float(stock[-1]) * 2**30)
    return int(tokens[-1].replace(",", "")), nbytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--budget", type=parse_nbytes, default=3 << 30, metavar="SIZE", help="(3GiB)")
    parser.add_argument("--margin", type=parse_nbytes, default=64 << 20, metavar="SIZE", help="pdkv's (64MiB)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the whole report there")
    options = parser.parse_args(argv)
    common = {**COMMON, "model": options.model}
    share = FIXED_UTILIZATION * options.budget / node_bytes()
    try:
        stock = StockEngine(extra_args=("--gpu-memory-utilization", f"{share:.6f}"), **common)
        left = options.budget - options.margin
        pdkv = EngineDeployment(engine_settings(role="prefill", engine_memory=left, **common))
        results = [
            measure("stock vLLM, 0.92", stock, options.model, options.budget),
            measure("pdkv, measured", pdkv, options.model, options.budget),
        ]
    except PdkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(headline("One memory budget, two ways to size the KV cache"))
    print(table(["engine", "KV tokens", "start", "used of budget", "answered"], [row(result) for result in results]))
    if options.json is not None:
        settings = {
            **common,
            "budget_bytes": options.budget,
            "margin_bytes": options.margin,
            "loads": [asdict(load) for load in LOADS],
        }
        write_json(options.json, "sizing", settings, {result.name: asdict(result) for result in results})
    return 0


def row(result: Result) -> list[str]:
    over = "" if result.used_bytes <= result.budget_bytes else ", OVER"
    return [
        result.name,
        f"{result.kv_tokens:,}",
        f"{result.start_s:.0f} s",
        f"{format_nbytes(result.used_bytes)} of {format_nbytes(result.budget_bytes)}{over}",
        f"{result.answered} of {result.asked}",
    ]


if __name__ == "__main__":
    sys.exit(main())
