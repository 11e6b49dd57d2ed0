"""The verdict of the demo with sleeps: which conditions fail it, and what the report holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdkv.errors import ConfigError
from pdkv.harness.client import Completion
from pdkv.harness.compare import Result
from pdkv.harness.dataset import Problem
from pdkv.harness.sleep import ConnectorRun, connector_report, parse, parts, run, summary
from pdkv.harness.sleeper import SleepRecord
from pdkv.harness.status import EngineFacts

pytestmark = pytest.mark.cpu

GIB = 1 << 30
SLEPT = SleepRecord(
    role="prefill",
    what="sleep",
    committed_bytes=GIB,
    resident_before=3 * GIB,
    resident_asleep=2 * GIB,
    resident_after=3 * GIB,
    status_asleep=503,
    generation_before=1,
    generation_after=2,
    times_s={"sleep": 0.2, "wake_up": 0.1},
)
UPDATED = replace(SLEPT, what="weight update", resident_asleep=None, status_asleep=None, generation_before=2,
                  generation_after=3)  # fmt: skip


def completion(*tokens: int) -> Completion:
    return Completion(prompt_tokens=3, token_ids=tokens, text="", finish_reason="length")


def result(*tokens: int) -> Result:
    problem = Problem(number=1, question="q", answer="#### 1")
    return Result(problem, completion(1, 2), completion(*tokens))


def done(*records: SleepRecord, **counts: int) -> ConnectorRun:
    values = {"requests": 1, "remote_prefill_hits": 1, "recomputed_tokens": 0, "failed_loads": 0, **counts}
    return ConnectorRun((), records, EngineFacts({}, values))


def test_the_report_has_what_was_promised() -> None:
    report = connector_report([result(1, 2)], done(SLEPT, UPDATED))
    assert (report["problems"], report["identical"], report["resident_drop_fraction"]) == (1, 1, 1.0)
    assert report["generations"] == {"prefill": [1, 2, 3], "decode": []}
    assert report["failures"] == []


@pytest.mark.parametrize(
    ("tokens", "records", "counts", "sentence"),
    [
        ((1, 9), (SLEPT,), {}, "1 of 1 problems differ"),
        ((1, 2), (SLEPT,), {"remote_prefill_hits": 0}, "only 0 of 1 requests"),
        ((1, 2), (SLEPT,), {"recomputed_tokens": 4}, "4 tokens recomputed"),
        ((1, 2), (replace(SLEPT, resident_asleep=3 * GIB - GIB // 2),), {}, "gave back 50% of the cache"),
        ((1, 2), (replace(SLEPT, generation_after=1),), {}, "did not raise the generation"),
        ((1, 2), (replace(SLEPT, status_asleep=200),), {}, "answered 200"),
    ],
)
def test_each_condition_that_does_not_hold_is_a_sentence(
    tokens: tuple[int, ...], records: tuple[SleepRecord, ...], counts: dict[str, int], sentence: str
) -> None:
    report = connector_report([result(*tokens)], done(*records, **counts))
    assert len(report["failures"]) == 1
    assert sentence in report["failures"][0]
    assert any("FAILED: pull" in line for line in summary({"passed": False, "connectors": {"pull": report}}))


def test_problems_are_asked_in_parts_of_nearly_the_same_length() -> None:
    assert [list(part) for part in parts(list(range(10)), 4)] == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]  # type: ignore[arg-type]


def test_too_few_problems_are_refused_before_anything_starts(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "q", "answer": "a #### 1"}\n' * 3)
    with pytest.raises(ConfigError, match="3 problems are too few"):
        run(parse(["--model", "m", "--data", str(data)]))


def test_an_unknown_connector_is_refused_before_anything_starts(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "q", "answer": "a #### 1"}\n' * 4)
    with pytest.raises(ConfigError, match="no KV connector is called 'nxl'"):
        run(parse(["--model", "m", "--data", str(data), "--connector", "nixl-pull", "--connector", "nxl"]))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--concurrency", "0"], "--concurrency: '0' is not a whole"),
        (["--report", "/proc/nobody/report.json"], "cannot be written"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_at_the_start(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(["--model", "m", "--data", "d", *arguments])
