"""``python -m pdkv.harness.sleep``: the same tokens as one stock engine, with sleeps and a weight update in between.

Asks a stock vLLM every problem, and then, for each connector, prefill + decode, a part of the problems at a time:
before anything; after prefill has slept and woken; after decode has; after both have loaded their weights again, with
the KV cache's memory lent for it. All tokens must be identical, each sleep must give back most of the cache's memory,
and each change must have raised the generation that peers know.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pdkv import registry
from pdkv.arguments import COUNT, SECONDS, ArgumentParser
from pdkv.errors import ConfigError
from pdkv.harness.client import Completion, ask_all
from pdkv.harness.compare import Result, compare
from pdkv.harness.dataset import load_problems
from pdkv.harness.engines import EngineOptions, RequestOptions, run_reference
from pdkv.harness.options import add_questions, check_questions, few_shot_of
from pdkv.harness.program import run_program, say
from pdkv.harness.prompts import Prompt, build_prompts
from pdkv.harness.report import write_report
from pdkv.harness.sleeper import Sleeper, SleepRecord
from pdkv.harness.status import EngineFacts, collect, counters
from pdkv.launch.deployment import PDDeployment
from pdkv.launch.settings import ENGINE_READY_TIMEOUT_S, PDSettings
from pdkv.launch.sizes import parse_nbytes

#: What a sleep must give back, of the bytes that the cache had committed.
LEAST_DROP = 0.9
STAGES = ("before", "after prefill slept", "after decode slept", "after the weight update")
#: More largest layers than any host has room for, so that the update must borrow the cache's memory.
_SHORT_OF_MEMORY = {"PDKV_SIZING_WEIGHT_UPDATE_FACTOR": "1000000"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepOptions:
    """What the user asked for. `engine.connector` is not looked at: each of `connectors` is run."""

    data: Path
    few_shot: Path
    limit: int | None
    max_tokens: int
    prompt: str
    connectors: tuple[str, ...]
    requests: RequestOptions
    engine: EngineOptions
    report: Path | None


@dataclass(frozen=True, slots=True)
class ConnectorRun:
    """What one connector did."""

    completions: tuple[Completion, ...]
    records: tuple[SleepRecord, ...]
    facts: EngineFacts


def run(options: SleepOptions) -> dict[str, Any]:
    """Carry it out, print the verdict, write the report, and return that.

    Raises:
        ConfigError: bad input; nothing was started.
        LaunchError: an engine did not start or died.
        HarnessError: an engine did not answer as it should.
    """
    problems = load_problems(options.data, options.limit)
    if len(problems) < len(STAGES):
        raise ConfigError(f"{len(problems)} problems are too few for {len(STAGES)} stages; raise --limit.")
    for name in options.connectors:  # the reference alone takes a minute to start
        registry.find(name)
    examples = load_problems(options.few_shot) if options.prompt == "few-shot" else ()
    prompts = build_prompts(problems, options.prompt, examples, options.max_tokens)
    began = time.monotonic()
    reference = run_reference(prompts, options.engine, options.requests, say)
    connectors = {}
    for name in options.connectors:
        done = run_connector(name, prompts, options)
        connectors[name] = connector_report(compare(problems, reference, done.completions), done)
    report = {
        "passed": all(not entry["failures"] for entry in connectors.values()),
        "connectors": connectors,
        "settings": {
            "model": str(options.engine.model), "data": str(options.data), "max_tokens": options.max_tokens,
            "kv_bytes": options.engine.kv_bytes, **options.engine.common(),
        },
        "times_s": {"all": round(time.monotonic() - began, 1)},
    }  # fmt: skip
    if options.report is not None:
        write_report(options.report, report)
    for line in summary(report):
        print(line, flush=True)
    return report


def run_connector(name: str, prompts: Sequence[Prompt], options: SleepOptions) -> ConnectorRun:
    """Start prefill, decode and proxy with one connector, and go through the stages."""
    engine = options.engine
    settings = PDSettings.build(
        engine.model,
        connector=name,
        enable_sleep=True,
        ready_timeout_s=engine.ready_timeout_s,
        log_dir=None if engine.log_dir is None else engine.log_dir / name,
        kv_bytes=engine.kv_bytes,
        extra_env=_SHORT_OF_MEMORY,
        prefill={"extra_args": engine.extra_args},
        # As in the demo: without a prefix cache on decode every block of every prompt travels.
        decode={"extra_args": (*engine.extra_args, "--no-enable-prefix-caching")},
        **engine.common(),
    )
    with PDDeployment(settings, report=say) as deployment:
        roles = ("prefill", "decode")
        sleepers = {
            role: Sleeper(role, deployment.url_of(role), lambda role=role: deployment.status(role))  # type: ignore[misc]
            for role in roles
        }
        before = counters(deployment.status("decode"))
        records: list[SleepRecord] = []
        completions: list[Completion] = []
        for stage, part in zip(STAGES, parts(prompts, len(STAGES)), strict=True):
            if stage == STAGES[1]:
                records.append(sleepers["prefill"].sleep_and_wake())
            elif stage == STAGES[2]:
                records.append(sleepers["decode"].sleep_and_wake())
            elif stage == STAGES[3]:
                records += [sleepers[role].update_weights() for role in roles]
            say(f"{name}: {len(part)} problems {stage}")
            completions += asyncio.run(
                ask_all(
                    deployment.proxy_url,
                    part,
                    concurrency=options.requests.concurrency,
                    timeout_s=options.requests.timeout_s,
                )
            )
        return ConnectorRun(tuple(completions), tuple(records), collect(deployment.status, before, len(prompts)))


def parts(prompts: Sequence[Prompt], count: int) -> list[Sequence[Prompt]]:
    """`prompts` in `count` parts of nearly the same length, in order."""
    cuts = [len(prompts) * index // count for index in range(count + 1)]
    return [prompts[begin:end] for begin, end in pairwise(cuts)]


def connector_report(results: Sequence[Result], done: ConnectorRun) -> dict[str, Any]:
    """One connector in the report; `failures` has a sentence for each condition that does not hold."""
    drops = [record.drop_fraction for record in done.records if record.drop_fraction is not None]
    counts = done.facts.decode_counts
    generations: dict[str, list[int]] = {"prefill": [], "decode": []}
    for record in done.records:
        seen = generations[record.role]
        seen += [record.generation_before] if not seen else []
        seen.append(record.generation_after)
    report = {
        "problems": len(results),
        "identical": sum(result.difference is None for result in results),
        "resident_drop_fraction": round(min(drops), 4),
        "generations": generations,
        "remote_prefill_hits": counts["remote_prefill_hits"],
        "recomputed_tokens": counts["recomputed_tokens"],
        "failed_loads": counts["failed_loads"],
        "steps": [{**asdict(record), "drop_fraction": record.drop_fraction} for record in done.records],
    }
    return {**report, "failures": failures(report)}


def failures(report: dict[str, Any]) -> list[str]:
    """What does not hold of one connector."""
    total, found = report["problems"], []
    if report["identical"] != total:
        found.append(f"{total - report['identical']} of {total} problems differ from the stock engine.")
    if report["remote_prefill_hits"] != total:
        found.append(f"only {report['remote_prefill_hits']} of {total} requests had their KV from prefill.")
    if report["recomputed_tokens"] or report["failed_loads"]:
        found.append(f"{report['recomputed_tokens']} tokens recomputed, {report['failed_loads']} loads failed.")
    if report["resident_drop_fraction"] < LEAST_DROP:
        found.append(f"a sleep gave back {report['resident_drop_fraction']:.0%} of the cache, not {LEAST_DROP:.0%}.")
    for step in report["steps"]:
        if step["generation_after"] <= step["generation_before"]:
            found.append(f"{step['what']} of {step['role']} did not raise the generation.")
        if step["status_asleep"] not in (None, 503):
            found.append(
                f"a request to the {step['role']} engine asleep was answered {step['status_asleep']}, not 503."
            )
    return found


def summary(report: dict[str, Any]) -> list[str]:
    """The last lines that a user reads."""
    lines = []
    for name, entry in report["connectors"].items():
        lines.append(f"{name}: identical {entry['identical']} of {entry['problems']} problems")
        for step in entry["steps"]:
            freed = "" if step["drop_fraction"] is None else f", {step['drop_fraction']:.0%} of the KV cache given back"
            times = ", ".join(f"{call} {seconds:.2f} s" for call, seconds in step["times_s"].items())
            lines.append(
                f"  {step['role']} {step['what']}: generation {step['generation_before']} to "
                f"{step['generation_after']}{freed} ({times})"
            )
        lines += [f"FAILED: {name}: {sentence}" for sentence in entry["failures"]]
    return [*lines, "PASSED" if report["passed"] else "FAILED"]


def parser() -> ArgumentParser:
    """The options."""
    p = ArgumentParser(prog="python -m pdkv.harness.sleep", description=__doc__.split("\n\n")[0] if __doc__ else "")
    p.add_argument("--model", type=Path, required=True, help="local model folder")
    add_questions(p, max_tokens=64)
    p.add_argument("--connector", action="append", help="KV connector; repeat for more (default: nixl-pull, nixl-push)")
    p.add_argument("--kv-bytes", default="256MiB", metavar="SIZE", help="KV budget of an engine (default: %(default)s)")
    p.add_argument("--max-model-len", type=COUNT, default=1024, help="default: %(default)s")
    p.add_argument("--block-size", type=COUNT, default=32, help="tokens per block (default: %(default)s)")
    p.add_argument("--ready-timeout", type=SECONDS, default=ENGINE_READY_TIMEOUT_S, metavar="S")
    p.add_argument("--log-dir", type=Path, help="folder for logs and status files")
    return p


def parse(argv: Sequence[str]) -> SleepOptions:
    """Options from the command line.

    Raises:
        ConfigError: an option is unknown, missing or not allowed.
    """
    a = parser().parse_args(list(argv))
    check_questions(a)
    engine = EngineOptions(
        model=a.model, connector="", dtype="float32", kv_bytes=parse_nbytes(a.kv_bytes), prefill_kv_bytes=None,
        engine_memory=None, max_model_len=a.max_model_len, block_size=a.block_size, log_dir=a.log_dir,
        ready_timeout_s=a.ready_timeout,
    )  # fmt: skip
    return SleepOptions(
        data=a.data,
        few_shot=few_shot_of(a),
        limit=a.limit,
        max_tokens=a.max_tokens,
        prompt=a.prompt,
        connectors=tuple(a.connector or ("nixl-pull", "nixl-push")),
        requests=RequestOptions(concurrency=a.concurrency, timeout_s=a.request_timeout),
        engine=engine,
        report=a.report,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code, as :mod:`pdkv.harness.gsm8k` does."""
    return run_program(lambda: run(parse(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
