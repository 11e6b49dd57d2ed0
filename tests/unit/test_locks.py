"""One engine at a time writes to a status folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdkv.errors import ConfigError, StateError
from pdkv.launch import EngineDeployment, engine_settings
from pdkv.locks import FolderLock, held_by

pytestmark = pytest.mark.cpu

HOLD = """
import sys
from pathlib import Path
from pdkv.locks import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.take()
print("held", flush=True)
sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the folder."""
    arguments = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_that_another_process_holds_is_refused_and_its_pid_is_named(tmp_path: Path) -> None:
    with holder(tmp_path / "new") as process:
        with pytest.raises(StateError, match=rf"another engine \(pid {process.pid}\) uses the folder {tmp_path}"):
            FolderLock(tmp_path / "new").take()
        assert held_by(tmp_path / "new") == str(process.pid)
        process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path: Path, signum: signal.Signals) -> None:
    process = holder(tmp_path)
    process.send_signal(signum)
    process.communicate()
    assert held_by(tmp_path) is None
    lock = FolderLock(tmp_path)
    lock.take()
    assert lock.path.read_text() == f"{os.getpid()}\n"
    lock.release()


def test_a_lock_that_was_released_is_free_and_taking_it_twice_changes_nothing(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()
    first.take()
    with pytest.raises(StateError):
        second.take()
    first.release()
    first.release()
    second.take()
    second.release()


def test_a_folder_without_a_lock_is_held_by_nobody(tmp_path: Path) -> None:
    assert held_by(tmp_path / "missing") is None


def test_the_launcher_refuses_a_status_folder_in_use_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    settings = engine_settings(model=tmp_path / "model", role="decode", device="cpu")
    with holder(tmp_path / "decode") as process:
        with pytest.raises(ConfigError, match=rf"another engine \(pid {process.pid}\) writes its status"):
            EngineDeployment(settings, status_dir=tmp_path)
        process.communicate()
