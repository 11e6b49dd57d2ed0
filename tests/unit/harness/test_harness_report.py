"""The verdict: passing needs every condition, and each broken one has its sentence."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from harness_protocol import worker_status

from pdkv.errors import HarnessError
from pdkv.harness.client import Completion
from pdkv.harness.compare import Result, compare
from pdkv.harness.dataset import Problem
from pdkv.harness.report import build_report, failures, summary, table, write_report
from pdkv.harness.status import COUNTERS, EngineFacts, collect, counters, engine_facts

pytestmark = pytest.mark.cpu

PROBLEMS = [Problem(n, f"Question {n}?", f"#### {n}") for n in (1, 2)]
HEALTHY_COUNTS = {
    "requests": 2,
    "remote_prefill_hits": 2,
    "remote_tokens": 14,
    "recomputed_tokens": 0,
    "failed_loads": 0,
}


def results(second: tuple[int, ...] = (3, 4)) -> tuple[Result, ...]:
    reference = [Completion(7, (1, 2), "#### 1", "stop"), Completion(7, (3, 4), "#### 5", "length")]
    candidate = [reference[0], Completion(7, second, "#### 2", "length")]
    return compare(PROBLEMS, reference, candidate)


def facts(*, counts: dict[str, int] | None = None, **decode: Any) -> EngineFacts:
    engines = {
        "prefill": engine_facts("prefill", {"workers": [worker_status()]}),
        "decode": engine_facts("decode", {"workers": [worker_status(**decode)]}),
    }
    return EngineFacts(engines, {**HEALTHY_COUNTS, **(counts or {})})


def test_a_healthy_run_passes() -> None:
    assert failures(results(), facts()) == ()


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (facts(counts={"remote_prefill_hits": 1}), "prompt's KV from prefill for 1 of 2 requests"),
        (facts(counts={"remote_prefill_hits": 3}), "for 3 of 2 requests"),
        (facts(counts={"recomputed_tokens": 31}), "recomputed 31 prompt tokens"),
        (facts(counts={"failed_loads": 1}), "1 loads of KV from prefill failed"),
        (facts(chunks_per_segment=2), "segment of the decode engine lies in 2 chunks"),
    ],
)
def test_each_broken_condition_fails_alone_and_is_named(broken: EngineFacts, sentence: str) -> None:
    (found,) = failures(results(), broken)
    assert sentence in found


def test_one_differing_token_fails_and_is_named_with_its_position() -> None:
    (found,) = failures(results(second=(3, 9)), facts())
    assert found == "1 of 2 problems differ, the first is problem 2: token 1 (reference 4, candidate 9)."


def test_the_report_has_the_keys_that_users_rely_on() -> None:
    report = build_report(results(second=(3,)), facts(), {"max_tokens": 2}, {"all": 1.26})
    assert report["problems"] == 2
    assert report["identical"] == 1
    assert report["first_difference"] == {"2": {"position": 1, "reference_token": 4, "candidate_token": None}}
    assert (report["remote_prefill_hits"], report["recomputed_tokens"]) == (2, 0)
    assert report["accuracy"] == {"reference": 0.5, "candidate": 1.0}
    assert report["passed"] is False
    for role in ("prefill", "decode"):
        assert report["engines"][role] == {**worker_status(), "ranks": 1}
    json.dumps(report)


def test_the_table_shows_each_problem_and_where_it_differs() -> None:
    lines = table(results(second=(3, 9))).splitlines()
    assert len(lines) == 3
    assert lines[1].endswith("identical")
    assert lines[2].endswith("DIFFERS at token 1 (reference 4, candidate 9)")


def test_tokens_alone_are_called_tokens_alone() -> None:
    report = build_report(results(), None, {}, {})
    assert report["passed"] is True
    assert report["remote_prefill_hits"] is None
    assert report["engines"] is None
    assert "not looked at" in summary(report)


def test_the_worst_rank_of_an_engine_decides() -> None:
    ranks = [worker_status(), worker_status(chunks_per_segment=3, connector_created_after_extend=False)]
    found = engine_facts("decode", {"workers": ranks})
    assert (found["chunks_per_segment"], found["connector_created_after_extend"], found["ranks"]) == (3, False, 2)


def test_an_engine_without_a_status_or_of_another_version_is_an_error() -> None:
    with pytest.raises(HarnessError, match="has written no status"):
        engine_facts("prefill", {"workers": []})
    with pytest.raises(HarnessError, match="lacks generation"):
        engine_facts("prefill", {"workers": [{k: v for k, v in worker_status().items() if k != "generation"}]})


def test_counters_of_a_run_are_what_was_added_since_it_began() -> None:
    late = itertools.chain([10, 11], itertools.repeat(12))

    def read(role: str) -> dict[str, Any]:
        requests = next(late) if role == "decode" else 0
        return {"workers": [worker_status()], "scheduler": {**dict.fromkeys(COUNTERS, 0), "requests": requests}}

    before = counters({"scheduler": {"requests": 10}})
    assert collect(read, before, 2, poll_s=0.001).decode_counts["requests"] == 2


def test_requests_that_decode_never_counts_are_not_waited_for_without_end() -> None:
    found = collect(lambda role: {"workers": [worker_status()], "scheduler": None}, counters({}), 2, timeout_s=0.01)
    assert found.decode_counts["requests"] == 0
    assert any("0 of 2 requests" in sentence for sentence in failures(results(), found))


def test_a_report_is_written_whole_or_refused_in_a_sentence(tmp_path: Path) -> None:
    report = build_report(results(), facts(), {}, {})
    write_report(tmp_path / "new" / "report.json", report)
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == report
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match="cannot write the report"):
        write_report(tmp_path / "file" / "report.json", report)


def test_a_report_that_does_not_fit_leaves_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()  # so that the last step, the rename, fails
    with pytest.raises(HarnessError, match="cannot write the report"):
        write_report(tmp_path / "report.json", {"passed": True})
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
