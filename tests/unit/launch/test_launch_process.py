"""Supervision of one process: readiness, deadlines, the end. Real processes, a clock that tests turn."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launched import environment, started_pids, survivors

from pdkv.errors import LaunchError
from pdkv.launch import Deployment
from pdkv.launch.command import API_SERVER, Command, http_url
from pdkv.launch.machine import pick_free_ports
from pdkv.launch.process import ManagedProcess, wait_ready

pytestmark = pytest.mark.cpu


class HandTurnedClock:
    """Time passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds


def fake_engine(pids: Path, mode: str = "serve") -> Command:
    (port,) = pick_free_ports(["127.0.0.1"])
    argv = (sys.executable, "-m", API_SERVER, "--port", str(port))
    return Command("prefill", argv, http_url("127.0.0.1", port), environment(pids, mode))


def python(code: str) -> Command:
    return Command("engine", (sys.executable, "-c", code), "http://127.0.0.1:1")


def test_waiting_says_what_it_waits_for_and_ends_at_its_deadline(tmp_path):
    said: list[str] = []
    process = ManagedProcess(python("import time; time.sleep(600)"), tmp_path / "log")
    process.start()
    with pytest.raises(LaunchError, match=r"engine did not answer http://127.0.0.1:1/health within 25 s"):
        wait_ready([process], 25.0, report=said.append, clock=HandTurnedClock())
    process.stop()
    assert len(said) == 2
    assert said[0].startswith("waiting for engine at http://127.0.0.1:1/health, 10 s of 25 s")


def test_waiting_ends_early_where_it_is_asked_to(tmp_path):
    process = ManagedProcess(python("import time; time.sleep(600)"), tmp_path / "log")
    process.start()
    ready = wait_ready([process], 25.0, report=print, should_stop=lambda: True, clock=HandTurnedClock())
    process.stop()
    assert ready is False


def test_a_process_that_ignores_sigterm_is_killed_with_all_it_started(tmp_path, pids):
    deployment = Deployment([[fake_engine(pids, "stubborn")]], log_dir=tmp_path / "logs", grace_s=0.2)
    with deployment:
        started = started_pids(pids)
    assert (survivors(started), len(started)) == (set(), 3)
    assert "did not end within 0.2 s of SIGTERM" in (tmp_path / "logs" / "prefill.log").read_text()


def test_an_exception_within_the_block_ends_all_processes(tmp_path, pids):
    with pytest.raises(ZeroDivisionError), Deployment([[fake_engine(pids)]], log_dir=tmp_path / "logs"):
        1 / 0  # noqa: B018
    assert survivors(started_pids(pids)) == set()


def test_what_ended_a_process_is_told_with_its_last_lines_where_there_is_no_exception(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\n(Worker pid=3) INFO 11-29 22:00:00 [a.py:1] two\n")
    text = ManagedProcess(python(""), log).describe_end(3)
    assert text == f"engine ended with exit code 3. Last lines of {log}:\n  | one\n  | two"


def test_a_program_that_does_not_exist_is_told(tmp_path):
    with (
        pytest.raises(LaunchError, match=r"ended with exit code 127: .*cannot start /no/such/program"),
        Deployment([[Command("engine", ("/no/such/program",), "http://127.0.0.1:1")]], log_dir=tmp_path / "logs"),
    ):
        pass


def test_the_engines_own_exit_code_is_reported(tmp_path):
    with (
        pytest.raises(LaunchError, match="ended with exit code 7"),
        Deployment([[python("raise SystemExit(7)")]], log_dir=tmp_path / "logs"),
    ):
        pass


def test_a_log_folder_of_its_own_is_removed_after_a_clean_end_and_kept_after_a_failure(pids):
    with Deployment([[fake_engine(pids)]]) as clean:
        assert clean.log_path("prefill").exists()
    assert not clean.log_dir.exists()
    failing = Deployment([[python("raise SystemExit(7)")]])
    with pytest.raises(LaunchError), failing:
        pass
    assert failing.log_path("engine").exists()
    failing.log_path("engine").unlink()
    failing.log_dir.rmdir()


def test_a_later_stage_starts_only_when_the_one_before_is_ready(tmp_path, pids):
    said: list[str] = []
    second = replace(fake_engine(pids), name="proxy")
    with Deployment([[fake_engine(pids)], [second]], log_dir=tmp_path / "logs", report=said.append):
        pass
    assert [line.split()[0:3:2] for line in said] == [["started", "log:"], ["prefill", "ready"], ["started", "log:"],
                                                       ["proxy", "ready"]]  # fmt: skip
