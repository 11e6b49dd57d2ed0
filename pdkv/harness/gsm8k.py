"""``python -m pdkv.harness.gsm8k``: the same tokens from prefill + decode as from one stock engine?

Accuracy is reported but decides nothing: a small model solves few problems, and a wrong KV cache can still give a right
number. The identity of all tokens decides, and that the tokens came the way they should have: see
:func:`pdkv.harness.report.failures`.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pdkv.errors import ConfigError, HarnessError
from pdkv.harness.client import Completion, check_reachable
from pdkv.harness.compare import compare
from pdkv.harness.dataset import load_problems
from pdkv.harness.engines import answers, build_candidate, run_candidate, run_reference
from pdkv.harness.options import Options, parse
from pdkv.harness.program import run_program, say
from pdkv.harness.prompts import Prompt, build_prompts
from pdkv.harness.report import build_report, summary, table, write_report
from pdkv.harness.saved import load_answers, save_answers
from pdkv.harness.status import EngineFacts, collect, counters
from pdkv.launch.deployment import read_status


def run(options: Options) -> dict[str, Any]:
    """Carry the comparison out, print its table, write its report, and return that.

    Raises:
        ConfigError: bad input; nothing was started.
        LaunchError: an engine did not start or died.
        HarnessError: an endpoint did not answer as it should.
    """
    problems = load_problems(options.data, options.limit)
    examples = load_problems(options.few_shot) if options.prompt == "few-shot" else ()
    prompts = build_prompts(problems, options.prompt, examples, options.max_tokens)
    times_s: dict[str, float] = {}
    began = time.monotonic()
    if options.engine is not None:
        sides = functools.partial(_start_both, options, prompts, times_s)
    else:
        sides = functools.partial(_ask_both, options, prompts, times_s)
    reference, candidate, facts = sides()
    times_s["all"] = time.monotonic() - began
    results = compare(problems, reference, candidate)
    report = build_report(results, facts, _settings(options), times_s)
    if options.report is not None:  # before anything is printed: a closed pipe must not cost the result
        write_report(options.report, report)
    _show(table(results), summary(report), *([f"report: {options.report}"] if options.report else ()))
    return report


def _show(*texts: str) -> None:
    """Print for the user. HarnessError where standard output takes nothing, so that the exit code tells."""
    try:
        for text in texts:
            print(text, flush=True)
    except OSError as error:
        sys.stdout = None  # nothing is flushed into it once more at exit
        raise HarnessError(f"cannot write the result to standard output ({error.strerror}).") from error


Sides = tuple[tuple[Completion, ...], tuple[Completion, ...], EngineFacts | None]


def _start_both(options: Options, prompts: Sequence[Prompt], times_s: dict[str, float]) -> Sides:
    engine = options.engine
    if engine is None:
        raise ConfigError("no engine to start.")
    build_candidate(engine, say)  # a wrong setting of the second side shows before the first side's minute
    ask = functools.partial(run_reference, prompts, engine, options.requests, say)
    reference = _reference(options, prompts, times_s, ask)
    began = time.monotonic()
    candidate, facts = run_candidate(build_candidate(engine, say), prompts, options.requests)
    times_s["candidate"] = time.monotonic() - began
    return reference, candidate, facts


def _ask_both(options: Options, prompts: Sequence[Prompt], times_s: dict[str, float]) -> Sides:
    url, status_dir = str(options.candidate_url), options.status_dir
    asyncio.run(check_reachable(url))
    before = counters(read_status(status_dir / "decode")) if status_dir else {}
    ask = functools.partial(answers, str(options.reference_url), prompts, options.requests, "reference")
    reference = _reference(options, prompts, times_s, ask)
    began = time.monotonic()
    candidate = answers(url, prompts, options.requests, "prefill + decode")
    times_s["candidate"] = time.monotonic() - began
    if status_dir is None:
        return reference, candidate, None
    facts = collect(lambda role: read_status(status_dir / role), before, len(prompts))
    return reference, candidate, facts


def _reference(
    options: Options,
    prompts: Sequence[Prompt],
    times_s: dict[str, float],
    ask: Callable[[], tuple[Completion, ...]],
) -> tuple[Completion, ...]:
    if options.load_reference is not None:
        return load_answers(options.load_reference, prompts)
    began = time.monotonic()
    completions = ask()
    times_s["reference"] = time.monotonic() - began
    if options.save_reference is not None:
        save_answers(options.save_reference, prompts, completions)
    return completions


def _settings(options: Options) -> dict[str, Any]:
    engine = options.engine
    settings: dict[str, Any] = {
        "data": str(options.data),
        "prompt": options.prompt,
        "max_tokens": options.max_tokens,
        "concurrency": options.requests.concurrency,
    }
    if engine is None:
        return {**settings, "reference_url": options.reference_url, "candidate_url": options.candidate_url}
    return {
        **settings,
        "model": str(engine.model),
        "connector": engine.connector,
        **engine.common(),
        "kv_bytes": engine.kv_bytes,
        "prefill_kv_bytes": engine.prefill_kv_bytes or engine.kv_bytes,
        "engine_memory": engine.engine_memory,
        "decode_prefix_caching": engine.decode_prefix_caching,
        "corrupt_received_kv": engine.corrupt_received_kv,
        "extra_args": list(engine.extra_args),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    return run_program(lambda: run(parse(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
