"""What programs refuse on their command lines before they do anything."""

from __future__ import annotations

import argparse
import ast
import os
import sys
from pathlib import Path

import pytest

from pdkv.arguments import COUNT, MINUTES, NATURAL, NOT_NEGATIVE, POSITIVE, SECONDS, SHARE, Number, check_writable
from pdkv.errors import ConfigError
from pdkv.testing.faults.__main__ import main as faults

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
#: Programs whose numbers may come from a file as well: one place checks both, `settings.py` beside them.
CHECKED_BY_THEIR_SETTINGS = {"pdkv/launch/cli.py", "pdkv/proxy/__main__.py"}


def test_a_file_whose_folder_is_missing_can_be_written_and_the_folder_is_made(tmp_path: Path) -> None:
    check_writable("--json", tmp_path / "new" / "report.json")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    check_writable("--json", None)


@pytest.mark.parametrize("name", ["", "a.file/report.json", "x" * 300 + "/report.json", "nul\0/report.json"])
def test_a_file_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.file").touch()
    with pytest.raises(ConfigError, match=r"--json '.* cannot be written \(.*\); name another file\."):
        check_writable("--json", tmp_path / name)


def test_a_file_is_tried_since_root_may_write_by_its_mode_what_the_kernel_does_not_let_be_made(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/proc/report.json"), tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_writable("--json", path)
    (tmp_path / "old.json").write_text("kept")
    check_writable("--json", tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"


def test_a_benchmark_refuses_a_report_that_it_could_not_write_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(os.fspath(BENCHMARKS))
    import _report

    parser = argparse.ArgumentParser()
    _report.add_report_options(parser)
    assert parser.parse_args(["--json", str(tmp_path / "a.json")]).json == tmp_path / "a.json"
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", str(tmp_path)])
    assert "cannot be written (Is a directory); name another file." in capsys.readouterr().err
    sys.modules.pop("_report")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "nan"], "--minutes: 'nan' is not a number above 0"),
        (["--minutes", "-1", "--processes"], "--minutes: '-1' is not a number above 0"),
        (["--minutes", "inf"], "--minutes: 'inf' is not a number above 0"),
        (["--schedules", "0"], "--schedules: '0' is not a whole number of at least 1"),
        (["--schedules", "1", "--seed", "-1"], "--seed: '-1' is not a whole number of at least 0"),
        (["--minute", "1"], "unrecognized arguments: --minute"),
        (["--processes", "--transport", "bogus"], "no transport is called 'bogus'"),
        (["--processes", "--transport", "os:nothing"], "the transport 'os:nothing' is not there"),
    ],
)
def test_the_fault_harness_refuses_what_would_show_nothing(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert faults(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        (
            COUNT,
            ["1", "+7", " 3 ", "1000000000000000000"],
            ["0", "-1", "1.5", "1e3", "1_000", "٣", "9" * 5000, "", "nan"],
        ),
        (NATURAL, ["0", "-0"], ["-1"]),
        (POSITIVE, ["1e-300", "0.5", "1e18"], ["0", "-1", "1e19", "inf", "-inf", "nan", "1e999", "much", ""]),
        (NOT_NEGATIVE, ["0", "0.0"], ["-0.1", "nan", "inf"]),
        (SHARE, ["1", "0.92"], ["0", "1.01", "nan"]),
        (SECONDS, ["0.001", "2592000"], ["0", "2592001", "1e300", "inf", "nan"]),
        (MINUTES, ["43200"], ["43201", "nan"]),
    ],
)
def test_a_number_is_taken_within_its_bounds_and_otherwise_the_sentence_says_which_they_are(
    kind: Number, taken: list[str], refused: list[str]
) -> None:
    for text in taken:
        assert kind(text) == float(text)
        assert kind.of_variable({"PDKV_X": text}, "PDKV_X") == float(text)
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError) as refusal:
            kind(text)
        assert str(refusal.value) == f"{text!r} is not {kind.wanted}"
        if text:
            with pytest.raises(ConfigError, match=r"^PDKV_X must be a .*; correct it or unset it") as error:
                kind.of_variable({"PDKV_X": text}, "PDKV_X")
            assert kind.wanted in str(error.value)


def test_a_variable_that_is_not_set_or_empty_is_no_number() -> None:
    assert COUNT.of_variable({}, "PDKV_X") is None
    assert COUNT.of_variable({"PDKV_X": ""}, "PDKV_X") is None


def test_every_program_says_which_numbers_an_option_may_have() -> None:
    programs = [
        path for folder in ("pdkv", "connectors", "benchmarks", "scripts", "examples", "tests/fuzz")
        for path in (ROOT / folder).rglob("*.py")
        if "add_argument" in path.read_text()
    ]  # fmt: skip
    found = {
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in programs
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
        for keyword in call.keywords
        if keyword.arg == "type"
        and isinstance(keyword.value, ast.Name)
        and keyword.value.id in ("int", "float", "kind")
    }
    assert len(programs) > 10
    assert {place.split(":")[0] for place in found} == CHECKED_BY_THEIR_SETTINGS, sorted(found)
