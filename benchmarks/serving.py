"""Serving with and without pdkv, on the CPU, in one run.

    python benchmarks/serving.py [--quick] [--model DIR] [--json FILE] [--png FILE]

Compares one aggregated stock vLLM, stock prefill + decode (vLLM's own cache and NixlConnector), and prefill + decode
with pdkv. All are started, one after the other, and then take turns: in each turn a few requests one by one (time to
first token, time per token) and a burst at once (throughput), the same prompts for all. At the end each is left idle
for some seconds while the CPU time of its processes is counted. A side whose turn it is not is frozen.

Ratios are medians over pairs of measurements that were taken one right after the other. What pdkv is held to is printed
with them, and how many cores other programs took meanwhile: where that is not near 0, ratios tell which side stands
competition better, not which is faster. The run fails if decode with pdkv computed a prompt that it should have
received.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _report import (
    Samples,
    add_report_options,
    draw_bars,
    format_nbytes,
    format_ratio,
    format_time,
    headline,
    machine,
    paired_ratio,
    table,
    write_json,
)
from _sides import KINDS, Side, build, require_memory, say, start
from _stream import Answer, ask, random_prompt

from pdkv.arguments import COUNT
from pdkv.errors import PdkvError
from pdkv.harness.model import prepare_model

DEFAULT_MODEL = Path("build/models/smollm2-135m-instruct")
#: pdkv against stock P/D: at most 3 % slower, and an engine idle below 5 % of a core.
SLOWER_LIMIT = 1.03
IDLE_LIMIT = 0.05
STOCK, PDKV = "stock-pd", "pdkv-pd"


@dataclass(frozen=True)
class Load:
    """What is asked in one turn: `single` requests one by one, then `burst` at once."""

    turns: int
    single: int
    burst: int
    prompt_tokens: int
    output_tokens: int
    idle_s: float


@dataclass
class Measured:
    """What came out for one side."""

    start_s: float
    ttft_s: Samples = field(default_factory=Samples)
    per_token_s: Samples = field(default_factory=Samples)
    throughput: Samples = field(default_factory=Samples)
    other_programs_cores: Samples = field(default_factory=Samples)
    idle_cores: dict[str, float] = field(default_factory=dict)
    resident_bytes: dict[str, int] = field(default_factory=dict)
    decode_counts: dict[str, int] | None = None


def take_turn(side: Side, measured: Measured, load: Load, turn: int) -> None:
    """One side's measurements of one turn. The prompts depend on the turn alone."""

    def prompts(first: int, count: int) -> list[list[int]]:
        return [random_prompt(1000 * turn + first + index, load.prompt_tokens) for index in range(count)]

    with side.turn():
        ask(side.url, prompts(900, 1), 2)  # what was swapped out of caches while frozen comes back; not counted
        others, turn_began = side.others_seconds(), time.perf_counter()
        answers: list[Answer] = []
        for prompt in prompts(0, load.single):
            answers += ask(side.url, [prompt], load.output_tokens)
        measured.ttft_s.values += [answer.first_token_s for answer in answers]
        measured.per_token_s.values += [answer.per_token_s for answer in answers]
        began = time.perf_counter()
        burst = ask(side.url, prompts(100, load.burst), load.output_tokens)
        took = time.perf_counter() - began
        measured.throughput.values.append(sum(answer.output_tokens for answer in burst) / took)
        others, took = side.others_seconds() - others, time.perf_counter() - turn_began
        measured.other_programs_cores.values.append(others / took)


def measure_rest(side: Side, measured: Measured, load: Load) -> None:
    """Idle CPU and memory, after all requests."""
    with side.turn():
        measured.idle_cores = side.idle_cpu(load.idle_s)
        measured.resident_bytes = side.resident_bytes()
        measured.decode_counts = side.remote_hits()


def require_remote_hits(measured: Measured, load: Load) -> None:
    """Refuse a result in which decode computed prompts itself: it would compare something else."""
    counts = measured.decode_counts or {}
    requests = load.turns * (1 + load.single + load.burst)
    if counts.get("remote_prefill_hits") != requests or counts.get("recomputed_tokens"):
        raise SystemExit(f"error: of {requests} prompts not all reached decode over the connector: {counts}")


def run(
    kinds: Sequence[str], model: Path, load: Load, engine: dict[str, Any], logs: Path | None
) -> dict[str, Measured]:
    """Start all kinds, let them take turns, end them."""
    deployments = {kind: build(kind, model, logs, engine) for kind in kinds}
    require_memory(deployments.values(), model, engine["kv_bytes"])
    with ExitStack() as stack:
        sides = [start(kind, deployment, stack) for kind, deployment in deployments.items()]
        results = {side.kind: Measured(side.start_s) for side in sides}
        for turn in range(load.turns):
            say(f"turn {turn + 1} of {load.turns}")
            for side in sides if turn % 2 == 0 else reversed(sides):
                take_turn(side, results[side.kind], load, turn)
        for side in sides:
            say(f"{side.kind} idle for {load.idle_s:g} s")
            measure_rest(side, results[side.kind], load)
    if PDKV in results:
        require_remote_hits(results[PDKV], load)
    return results


def engines_of(values: dict[str, Any]) -> dict[str, Any]:
    """Without the proxy."""
    return {name: value for name, value in values.items() if name != "proxy"}


def compare(results: dict[str, Measured]) -> dict[str, Any]:
    """Ratios of pdkv to the other kinds, and whether they are what pdkv is held to."""
    if PDKV not in results:
        return {}
    pdkv = results[PDKV]
    ratios = {
        kind: {
            "start": pdkv.start_s / other.start_s,
            "ttft": paired_ratio(pdkv.ttft_s.values, other.ttft_s.values),
            "per_token": paired_ratio(pdkv.per_token_s.values, other.per_token_s.values),
            "throughput": paired_ratio(pdkv.throughput.values, other.throughput.values),
            "resident": sum(pdkv.resident_bytes.values()) / sum(other.resident_bytes.values()),
        }
        for kind, other in results.items()
        if kind != PDKV
    }
    met = {"idle": max(engines_of(pdkv.idle_cores).values()) < IDLE_LIMIT}
    if STOCK in ratios:
        met["ttft"] = ratios[STOCK]["ttft"] <= SLOWER_LIMIT
        met["throughput"] = ratios[STOCK]["throughput"] >= 1 / SLOWER_LIMIT
    return {"pdkv_relative_to": ratios, "targets_met": met}


def rows(results: dict[str, Measured], comparison: dict[str, Any]) -> list[list[str]]:
    """The printed table: one row per quantity, one column per kind, then pdkv / stock P/D and the targets."""
    ratios = comparison.get("pdkv_relative_to", {}).get(STOCK, {})
    met = comparison.get("targets_met", {})
    limits = {
        "ttft": f"<= {SLOWER_LIMIT:g}x",
        "throughput": f">= {1 / SLOWER_LIMIT:.2f}x",
        "idle": f"< {IDLE_LIMIT:.0%} of a core",
    }

    def row(label: str, key: str, cells: list[str]) -> list[str]:
        verdict = f"{limits[key]}: {'yes' if met[key] else 'NO'}" if key in met else ""
        return [label, *cells, format_ratio(ratios.get(key)) if ratios else "", verdict]

    sides = results.values()
    return [
        row("start to ready", "start", [format_time(m.start_s) for m in sides]),
        row("time to first token", "ttft", [format_time(m.ttft_s.median) for m in sides]),
        row("time per token", "per_token", [format_time(m.per_token_s.median) for m in sides]),
        row("tokens/s, burst", "throughput", [f"{m.throughput.median:.1f}" for m in sides]),
        row("resident, all processes", "resident", [format_nbytes(sum(m.resident_bytes.values())) for m in sides]),
        row("cores taken by others", "others", [f"{m.other_programs_cores.median:.2f}" for m in sides]),
        row("idle, busiest engine", "idle", [f"{max(engines_of(m.idle_cores).values()):.1%}" for m in sides]),
    ]


def draw(path: Path, title: str, results: dict[str, Measured]) -> None:
    """The same as a picture."""
    panels = {
        "start to ready (s)": {k: m.start_s for k, m in results.items()},
        "time to first token (ms)": {k: m.ttft_s.median * 1e3 for k, m in results.items()},
        "time per token (ms)": {k: m.per_token_s.median * 1e3 for k, m in results.items()},
        "tokens/s in a burst": {k: m.throughput.median for k, m in results.items()},
        "resident memory (GiB)": {k: sum(m.resident_bytes.values()) / 2**30 for k, m in results.items()},
        "idle, busiest engine (% of a core)": {
            k: max(engines_of(m.idle_cores).values()) * 100 for k, m in results.items()
        },
    }
    draw_bars(path, title, panels)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_options(parser)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help=f"local folder (default {DEFAULT_MODEL})")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="leave some out")
    parser.add_argument("--turns", type=COUNT, help="(default: 5, with --quick 1)")
    parser.add_argument("--single", type=COUNT, default=3, help="requests one by one in each turn (default 3)")
    parser.add_argument("--burst", type=COUNT, default=4, help="requests at once in each turn (default 4)")
    parser.add_argument("--prompt-tokens", type=COUNT, default=256)
    parser.add_argument("--output-tokens", type=COUNT, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-bytes", type=COUNT, default=256 << 20, help="KV cache of each engine (default 256 MiB)")
    parser.add_argument("--log-dir", type=Path, help="keep the engines' logs there")
    parser.add_argument("--dry-run", action="store_true", help="print the commands of all sides, start nothing")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    turns = arguments.turns or (1 if arguments.quick else 5)
    idle_s = 5.0 if arguments.quick else 10.0
    load = Load(turns, arguments.single, arguments.burst, arguments.prompt_tokens, arguments.output_tokens, idle_s)
    engine = {"dtype": arguments.dtype, "kv_bytes": arguments.kv_bytes, "max_model_len": 1024, "block_size": 32}
    try:
        if arguments.model == DEFAULT_MODEL:
            prepare_model(DEFAULT_MODEL)
        if arguments.dry_run:
            for kind in arguments.kinds:
                for command in build(kind, arguments.model, arguments.log_dir, engine).commands:
                    print(f"{kind}: {command.shell()}")
            return 0
        print(headline(f"serving {arguments.model.name}, {load}"), flush=True)
        results = run(arguments.kinds, arguments.model, load, engine, arguments.log_dir)
    except (PdkvError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    comparison = compare(results)
    print(table(["", *results, "pdkv / stock-pd", "target"], rows(results, comparison)))
    if arguments.json:
        report = {"sides": {kind: vars(measured) for kind, measured in results.items()}, **comparison}
        write_json(arguments.json, "serving", {**asdict(load), **engine, "model": arguments.model}, report)
    if arguments.png:
        draw(
            arguments.png,
            f"{arguments.model.name} on {machine()['cores']} CPU cores, medians over turns: {turns}",
            results,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
