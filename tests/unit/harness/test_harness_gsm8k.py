"""The program against endpoints that run already: exit codes, sentences, report."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness_protocol import Endpoint, Respond, answer_with, worker_status

from pdkv.harness.gsm8k import main
from pdkv.harness.options import parser
from pdkv.launch.machine import pick_free_ports

pytestmark = pytest.mark.cpu

Serve = Callable[[Respond], Endpoint]
COUNTS = {"requests": 0, "remote_prefill_hits": 0, "remote_tokens": 0, "recomputed_tokens": 0, "failed_loads": 0}
LINES = 3


@pytest.fixture
def data(tmp_path: Path) -> Path:
    line = '{{"question": "How many are {n} and {n}?", "answer": "{n}+{n} = <<{n}+{n}={m}>>{m}.\\n#### {m}"}}\n'
    (tmp_path / "few_shot.jsonl").write_text("".join(line.format(n=n, m=2 * n) for n in range(1, 6)))
    path = tmp_path / "data.jsonl"
    path.write_text("".join(line.format(n=n, m=2 * n) for n in range(11, 11 + LINES)))
    return path


class Engines:
    """A stock server and a P/D pair behind a proxy, with the status files of the pair."""

    def __init__(self, serve: Serve, root: Path, *, wrong_token: bool = False, hits: int = 1) -> None:
        self.status_dir, self.counts, self.lock = root / "status", {**COUNTS, "requests": 40}, threading.Lock()
        self.wrong_token, self.hits = wrong_token, hits
        for role in ("prefill", "decode"):
            (self.status_dir / role).mkdir(parents=True)
            (self.status_dir / role / "worker-rank0.json").write_text(json.dumps(worker_status()))
        self.write_counts()
        self.reference = serve(lambda path, body: (200, answer_with([3, 1, 4], "#### 22")))
        self.candidate = serve(self.respond)

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.counts["requests"] += 1
            self.counts["remote_prefill_hits"] += self.hits
            self.write_counts()
        wrong = self.wrong_token and "12 and 12?" in body["prompt"]
        return 200, answer_with([3, 1, 5 if wrong else 4], "#### 22")

    def write_counts(self) -> None:
        temporary = self.status_dir / "decode" / ".scheduler"
        temporary.write_text(json.dumps(self.counts))
        temporary.replace(self.status_dir / "decode" / "scheduler.json")

    def arguments(self, data: Path, *more: str) -> list[str]:
        urls = ["--reference-url", self.reference.url, "--candidate-url", self.candidate.url + "/v1/"]
        return ["--data", str(data), *urls, "--report", str(data.parent / "report.json"), *more]


def report_of(data: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((data.parent / "report.json").read_text())
    return content


def test_equal_tokens_and_remote_hits_exit_0(
    serve: Serve, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = Engines(serve, tmp_path)
    assert main(engines.arguments(data, "--status-dir", str(engines.status_dir))) == 0
    report = report_of(data)
    assert (report["problems"], report["identical"], report["remote_prefill_hits"]) == (LINES, LINES, LINES)
    assert report["recomputed_tokens"] == 0
    assert "PASSED" in capsys.readouterr().out


def test_one_wrong_token_exits_1_and_is_reported(
    serve: Serve, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = Engines(serve, tmp_path, wrong_token=True)
    assert main(engines.arguments(data, "--status-dir", str(engines.status_dir))) == 1
    assert report_of(data)["first_difference"] == {"2": {"position": 2, "reference_token": 4, "candidate_token": 5}}
    assert "problem 2: token 2 (reference 4, candidate 5)" in capsys.readouterr().out


def test_equal_tokens_without_remote_hits_exit_1(serve: Serve, data: Path, tmp_path: Path) -> None:
    engines = Engines(serve, tmp_path, hits=0)
    assert main(engines.arguments(data, "--status-dir", str(engines.status_dir))) == 1
    assert report_of(data)["identical"] == LINES


def test_tokens_only_looks_at_tokens_only(serve: Serve, data: Path, tmp_path: Path) -> None:
    engines = Engines(serve, tmp_path, hits=0)
    assert main(engines.arguments(data, "--tokens-only")) == 0
    assert report_of(data)["remote_prefill_hits"] is None


def test_kept_answers_serve_as_the_reference_for_the_same_prompts_only(
    serve: Serve, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines, kept = Engines(serve, tmp_path), str(tmp_path / "kept.json")
    assert main(engines.arguments(data, "--tokens-only", "--save-reference", kept)) == 0
    asked = len(engines.reference.requests)
    assert main(engines.arguments(data, "--tokens-only", "--load-reference", kept)) == 0
    assert len(engines.reference.requests) == asked
    assert main(engines.arguments(data, "--tokens-only", "--load-reference", kept, "--max-tokens", "9")) == 2
    assert "other prompts" in capsys.readouterr().err


def test_an_unreachable_candidate_exits_3_before_the_reference_is_asked(
    serve: Serve, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = Engines(serve, tmp_path)
    engines.candidate.url = f"http://127.0.0.1:{pick_free_ports(['127.0.0.1'])[0]}"
    assert main(engines.arguments(data, "--tokens-only")) == 3
    assert "cannot be reached" in capsys.readouterr().err
    assert not engines.reference.requests


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: --data"),
        (["--data", "D"], "give --model to have engines started, or --reference-url and --candidate-url"),
        (["--data", "D", "--model", "M", "--candidate-url", "http://x"], "give one or the other"),
        (["--data", "D", "--reference-url", "http://x", "--candidate-url", "http://y"], "either --status-dir"),
        (["--data", "D", "--reference-url", "x", "--candidate-url", "http://y", "--tokens-only"], "no URL of a server"),
        (["--data", "D", "--candidate-url", "http://y", "--corrupt-received-kv"], "needs engines that the harness"),
        (["--data", "D", "--model", "M", "--limit", "0"], "--limit: '0' is not a whole number of at least 1"),
        (["--data", "D", "--model", "M", "--max-tokens", "1024"], "--max-tokens 1024 leaves no room for a prompt"),
        (["--data", "D", "--model", "M", "--kv-bytes", "many"], "'many' is not a size"),
        (["--data", "D", "--model", "M"], "cannot read the data set D"),
        (["--data", "D", "--models", "M"], "unrecognized arguments"),
    ],
)
def test_bad_input_exits_2_with_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not said.out


def test_a_wrong_model_folder_or_connector_exits_2_before_anything_starts(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", str(data), "--model", str(tmp_path / "none")]) == 2
    assert "model folder" in capsys.readouterr().err
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert main(["--data", str(data), "--model", str(model), "--connector", "pigeon"]) == 2
    assert "no KV connector is called 'pigeon'" in capsys.readouterr().err


def test_the_negative_control_stands_in_a_group_of_its_own() -> None:
    text = parser().format_help()
    assert text.index("diagnostics:") < text.index("--corrupt-received-kv", text.index("diagnostics:"))
    main_group = text[text.index("options:") : text.index("engines that the harness starts:")]
    assert "corrupt" not in main_group


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://a..b", "http://" + "a" * 300])
def test_a_url_that_nobody_can_have_exits_2_with_one_sentence(
    data: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(data), "--reference-url", "http://127.0.0.1:9", "--candidate-url", url, "--tokens-only"]
    assert main(arguments) == 2
    assert f"error: {url!r} is no URL of a server" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--report", "--save-reference"])
@pytest.mark.parametrize("path", ["", "/", "/dev/null/x", "/proc/x/y"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_asked(
    data: Path, option: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = ["--reference-url", "http://127.0.0.1:9", "--candidate-url", "http://127.0.0.1:9", "--tokens-only"]
    assert main(["--data", str(data), *urls, option, path]) == 2
    assert f"error: {option} " in capsys.readouterr().err
