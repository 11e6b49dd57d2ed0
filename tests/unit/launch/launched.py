"""The launcher as a real process in front of stand-in engines, and ways to see what is left of them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DEADLINE_S = 60.0
FAKE_VLLM = Path(__file__).parent / "fake_vllm"


def environment(pids: Path, mode: str = "serve") -> dict[str, str]:
    """An environment in which ``vllm`` is the stand-in."""
    path = [str(FAKE_VLLM), *(entry for entry in sys.path if entry)]
    own = {"PYTHONPATH": os.pathsep.join(path), "FAKE_PIDS": str(pids), "FAKE_ENGINE": mode, "TMPDIR": str(pids.parent)}
    return {**os.environ, **own}


@contextmanager
def launched(arguments: Sequence[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """``python -m pdkv.launch`` running; killed at the end, and after a deadline, where it has not ended by itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pdkv.launch", *arguments],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    watchdog = threading.Timer(DEADLINE_S, process.kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def read_urls(process: subprocess.Popen[str], names: Sequence[str]) -> dict[str, str]:
    """The addresses that the launcher prints once all is ready."""
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in names]
    assert [line[:1] for line in lines] == [[name] for name in names], process.communicate()[1]
    return {line[0]: line[1] for line in lines}


def run_to_end(process: subprocess.Popen[str], signum: int | None = None) -> tuple[int, str]:
    """Exit code and standard error, after sending `signum`."""
    if signum is not None:
        process.send_signal(signum)
    _, error = process.communicate(timeout=DEADLINE_S)
    return process.returncode, error


def started_pids(folder: Path) -> set[int]:
    """All processes that stand-in engines have started so far."""
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}


def survivors(pids: set[int]) -> set[int]:
    """Those that are still alive after a deadline; empty as soon as all have ended."""
    deadline = time.monotonic() + DEADLINE_S
    alive = set(pids)
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            alive.discard(pid)
            continue
        with os.fdopen(fd):
            if select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                alive.discard(pid)
            else:
                os.kill(pid, signal.SIGKILL)
    return alive
