"""The verdict over a run: the JSON report, the table, and the sentences that say what failed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pdkv.errors import HarnessError
from pdkv.harness.client import Completion
from pdkv.harness.compare import Result
from pdkv.harness.status import EngineFacts


def failures(results: Sequence[Result], facts: EngineFacts | None) -> tuple[str, ...]:
    """One sentence for each condition that does not hold; none where the run has passed.

    Conditions: every output identical; every prompt's KV came from prefill; nothing recomputed and no load failed; one
    chunk in every segment. Without `facts` (tokens alone were asked for) only the first is looked at.
    """
    total = len(results)
    found = []
    different = [result for result in results if result.difference is not None]
    if different:
        first = different[0]
        found.append(
            f"{len(different)} of {total} problems differ, the first is problem {first.problem.number}: "
            f"{_describe_difference(first)}."
        )
    if facts is None:
        return tuple(found)
    counts = facts.decode_counts
    if counts["remote_prefill_hits"] != total:
        found.append(
            f"decode took the prompt's KV from prefill for {counts['remote_prefill_hits']} of {total} requests; the "
            f"others were computed anew or not counted ({counts['requests']} requests ended on decode)."
        )
    if counts["recomputed_tokens"]:
        found.append(f"decode recomputed {counts['recomputed_tokens']} prompt tokens that prefill had computed.")
    if counts["failed_loads"]:
        found.append(f"{counts['failed_loads']} loads of KV from prefill failed; decode's log says why.")
    for role, engine in facts.engines.items():
        if engine["chunks_per_segment"] != 1:
            found.append(
                f"a segment of the {role} engine lies in {engine['chunks_per_segment']} chunks instead of one, so its "
                "registration would span several physical allocations."
            )
    return tuple(found)


def build_report(
    results: Sequence[Result], facts: EngineFacts | None, settings: Mapping[str, Any], times_s: Mapping[str, float]
) -> dict[str, Any]:
    """The report as JSON types.

    ``problems`` and ``identical`` are counts; ``first_difference`` has an entry for each problem that differs, by its
    number; ``results`` has one for each problem. What was not looked at is null.
    """
    counts = facts.decode_counts if facts else {}
    wrong = failures(results, facts)
    return {
        "passed": not wrong,
        "failures": list(wrong),
        "problems": len(results),
        "identical": sum(result.difference is None for result in results),
        "first_difference": {str(r.problem.number): asdict(r.difference) for r in results if r.difference is not None},
        "remote_prefill_hits": counts.get("remote_prefill_hits"),
        "recomputed_tokens": counts.get("recomputed_tokens"),
        "failed_loads": counts.get("failed_loads"),
        "remote_tokens": counts.get("remote_tokens"),
        "accuracy": {name: _accuracy(results, name) for name in ("reference", "candidate")},
        "engines": {role: dict(engine) for role, engine in facts.engines.items()} if facts else None,
        "settings": dict(settings),
        "times_s": {name: round(value, 1) for name, value in times_s.items()},
        "results": [_entry(result) for result in results],
    }


def _accuracy(results: Sequence[Result], side: str) -> float:
    correct = sum(result.is_correct(getattr(result, side)) for result in results)
    return round(correct / len(results), 4)


def _entry(result: Result) -> dict[str, Any]:
    return {
        "problem": result.problem.number,
        "question": result.problem.question,
        "expected": str(result.problem.expected),
        "prompt_tokens": result.reference.prompt_tokens,
        "identical": result.difference is None,
        "reference": _side(result, result.reference),
        "candidate": _side(result, result.candidate),
    }


def _side(result: Result, completion: Completion) -> dict[str, Any]:
    return {
        "tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "correct": result.is_correct(completion),
        "text": completion.text,
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report as a whole or not at all.

    Raises:
        HarnessError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise HarnessError(f"cannot write the report {path} ({error.strerror}); name another by --report.") from error


def table(results: Sequence[Result]) -> str:
    """One line for each problem: its beginning, tokens in and out, identical or where it differs."""
    lines = [f"{'':>4}  {'problem':<44}  {'prompt':>6}  {'tokens':>6}  result"]
    for result in results:
        question = result.problem.question
        shown = question if len(question) <= 44 else question[:41] + "..."
        verdict = "identical" if result.difference is None else f"DIFFERS at {_describe_difference(result)}"
        tokens = len(result.candidate.token_ids)
        number, prompt = result.problem.number, result.reference.prompt_tokens
        lines.append(f"{number:>4}  {shown:<44}  {prompt:>6}  {tokens:>6}  {verdict}")
    return "\n".join(lines)


def _describe_difference(result: Result) -> str:
    difference = result.difference
    if difference is None:
        return "no token"
    wanted, found = (
        "the end" if token is None else str(token) for token in (difference.reference_token, difference.candidate_token)
    )
    return f"token {difference.position} (reference {wanted}, candidate {found})"


def summary(report: Mapping[str, Any]) -> str:
    """The last lines that a user reads."""
    lines = [f"identical: {report['identical']} of {report['problems']} problems"]
    if report["engines"] is not None:
        lines.append(
            f"prompt KV from prefill: {report['remote_prefill_hits']} of {report['problems']} requests, "
            f"{report['recomputed_tokens']} tokens recomputed"
        )
        for role, engine in report["engines"].items():
            lines.append(
                f"{role}: {engine['warmup_blocks']} blocks for warmup, {engine['final_blocks']} after it "
                f"(room for {engine['capacity_blocks']}), {engine['bytes_committed'] / 2**20:.0f} MiB committed of "
                f"{engine['bytes_reserved'] / 2**20:.0f} MiB reserved, {engine['segments']} segments of "
                f"{engine['chunks_per_segment']} chunk"
            )
    else:
        lines.append("not looked at: whether KV came from prefill, and how the engines' memory lies (--tokens-only)")
    accuracy = report["accuracy"]
    lines.append(f"exact answers: reference {accuracy['reference']:.0%}, candidate {accuracy['candidate']:.0%}")
    lines += [f"FAILED: {sentence}" for sentence in report["failures"]] or ["PASSED"]
    return "\n".join(lines)
