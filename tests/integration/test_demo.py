"""The demo's program with real engines: equal tokens pass, corrupted KV fails, and a signal leaves no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

DATA = Path(__file__).parents[2] / "examples" / "data"
#: Problems whose 5-shot prompts are 575, 576 and 577 tokens long: below, at and above a multiple of the block size.
AT_A_BORDER = (10, 15, 3)
BLOCK_SIZE = 32
RUN_TIMEOUT_S = 500


def command(model: Path, folder: Path, *more: str) -> list[str]:
    options = ["--model", str(model), "--data", str(folder / "data.jsonl"), "--few-shot", str(DATA / "few_shot.jsonl")]
    sizes = ["--block-size", str(BLOCK_SIZE), "--kv-bytes", "256MiB", "--prefill-kv-bytes", "192MiB"]
    return [sys.executable, "-m", "pdkv.harness.gsm8k", *options, *sizes, "--max-tokens", "24", *more]


def run(model: Path, folder: Path, name: str, *more: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and output of one run."""
    report = folder / f"{name}.json"
    arguments = command(model, folder, "--report", str(report), "--log-dir", str(folder / name), *more)
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    output = result.stdout + result.stderr
    assert report.exists(), output
    return result.returncode, json.loads(report.read_text()), output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the problems at block borders."""
    path = tmp_path_factory.mktemp("demo")
    lines = (DATA / "grade_school.jsonl").read_text().splitlines()
    (path / "data.jsonl").write_text("".join(lines[number - 1] + "\n" for number in AT_A_BORDER))
    return path


@pytest.fixture(scope="module")
def passing(model: Path, folder: Path) -> tuple[int, dict[str, Any], str]:
    """A run as `make demo` makes it, over fewer problems."""
    return run(model, folder, "passing", "--save-reference", str(folder / "reference.json"))


def test_prefill_and_decode_give_the_tokens_of_a_stock_engine(passing: tuple[int, dict[str, Any], str]) -> None:
    code, report, output = passing
    assert code == 0, output
    assert report["identical"] == report["problems"] == len(AT_A_BORDER)
    assert report["remote_prefill_hits"] == len(AT_A_BORDER)
    assert report["recomputed_tokens"] == 0
    assert report["first_difference"] == {}
    assert output.count("  identical") == len(AT_A_BORDER)
    # decode keeps no prompts here: all of every prompt has travelled, but for the last token, whose logits it computes
    prompt_tokens = [result["prompt_tokens"] for result in report["results"]]
    assert sum(prompt_tokens) - len(prompt_tokens) <= report["remote_tokens"] <= sum(prompt_tokens)


def test_prompts_end_below_at_and_above_a_block_border(passing: tuple[int, dict[str, Any], str]) -> None:
    _, report, _ = passing
    assert [result["prompt_tokens"] % BLOCK_SIZE for result in report["results"]] == [BLOCK_SIZE - 1, 0, 1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_report_shows_a_cache_that_grew_before_its_connector_was_made(
    passing: tuple[int, dict[str, Any], str], role: str
) -> None:
    _, report, _ = passing
    engine = report["engines"][role]
    assert engine["warmup_blocks"] < engine["final_blocks"] <= engine["capacity_blocks"]
    assert engine["bytes_committed"] <= engine["bytes_reserved"]
    assert engine["chunks_per_segment"] == 1
    assert engine["segments"] > 0
    assert engine["generation"] > 0
    assert engine["connector_created_after_extend"] is True


def test_prefill_and_decode_may_end_with_different_block_counts(passing: tuple[int, dict[str, Any], str]) -> None:
    engines = passing[1]["engines"]
    assert engines["prefill"]["final_blocks"] < engines["decode"]["final_blocks"]


def test_corrupted_kv_fails_the_same_comparison(
    passing: tuple[int, dict[str, Any], str], model: Path, folder: Path
) -> None:
    assert passing[0] == 0, "without a run that passes, one that fails shows nothing"
    reference = str(folder / "reference.json")
    code, report, output = run(model, folder, "corrupted", "--load-reference", reference, "--corrupt-received-kv")
    assert code == 1, output
    assert report["identical"] == 0
    assert len(report["first_difference"]) == len(AT_A_BORDER)
    assert "FAILED: 3 of 3 problems differ" in output
    # the transfers themselves went well: nothing but the tokens can tell
    assert report["remote_prefill_hits"] == len(AT_A_BORDER)
    assert report["recomputed_tokens"] == 0


def test_a_signal_ends_the_harness_and_all_it_started(model: Path, folder: Path) -> None:
    mark = f"PDKV_TEST_MARK={os.getpid()}-signal"
    name, value = mark.split("=")
    arguments = command(model, folder, "--log-dir", str(folder / "signal"))
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env={**os.environ, name: value}) as harness:
        assert harness.stderr is not None
        for line in harness.stderr:
            if "started aggregated" in line:
                break
        assert len(marked(mark)) > 1, "the harness and at least one engine run"
        harness.send_signal(signal.SIGTERM)
        harness.communicate(timeout=60)
    assert harness.returncode == 128 + signal.SIGTERM
    assert marked(mark) == []


def marked(mark: str) -> list[int]:
    """Processes that have inherited `mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found
