"""Stopping a process for a while, as a debugger, a full swap or a paused container do to a peer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STOP_TIMEOUT_S = 30.0
_LOOK_INTERVAL_S = 0.001


def stop(pid: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Send SIGSTOP, and return when no thread of the process runs any more.

    To send the signal is not enough on a busy machine: one thread takes it, and until that one is given a core the
    others go on, and may still answer a peer.

    Raises:
        ProcessLookupError: there is no such process.
        TimeoutError: a thread still runs after `timeout_s` seconds.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    while running := _running_threads(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"threads {running} of process {pid} have not stopped within {timeout_s:g} s")
        time.sleep(_LOOK_INTERVAL_S)


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """The processes stand still inside; those that are left go on afterwards."""
    try:
        for pid in pids:
            stop(pid)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _running_threads(pid: int) -> list[int]:
    """Threads that are neither stopped nor ended."""
    running = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError as error:  # it was ended by somebody else, and its parent has taken notice
        raise ProcessLookupError(f"process {pid} has ended while it was being stopped") from error
    for task in tasks:
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            # What is between the parentheses is the thread's name, which may hold anything (proc(5)).
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "TtZX":
                running.append(int(task.name))
    return running
