"""What programs refuse on their command lines before they do anything."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pdkv.arguments import check_writable
from pdkv.errors import ConfigError
from pdkv.testing.faults.__main__ import main as faults

pytestmark = pytest.mark.cpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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
    import argparse

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
        (["--minutes", "nan"], "--minutes is nan; give a number above 0."),
        (["--minutes", "-1", "--processes"], "--minutes is -1.0; give a number above 0."),
        (["--minutes", "inf"], "--minutes is inf; give a number above 0."),
        (["--schedules", "0"], "--schedules is 0; give a number above 0."),
        (["--schedules", "1", "--seed", "-1"], "--seed is -1; give a number of at least 0."),
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
