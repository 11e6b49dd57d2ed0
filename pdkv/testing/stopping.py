"""Stopping a process for a while, as a debugger, a full swap or a paused container do to a peer; and ending one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STOP_TIMEOUT_S = KILL_TIMEOUT_S = 30.0
_LOOK_INTERVAL_S = 0.001
_STOPPED, _ENDED = "Tt", "ZX"  # states of a thread (proc(5))


def stop(pid: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Send SIGSTOP, and return when no thread of the process runs any more.

    To send the signal is not enough on a busy machine: one thread takes it, and until that one is given a core the
    others go on, and may still answer a peer.

    Raises:
        ProcessLookupError: there is no such process.
        TimeoutError: a thread still runs after `timeout_s` seconds.
    """
    os.kill(pid, signal.SIGSTOP)
    _wait_for(pid, _STOPPED + _ENDED, "stopped", timeout_s)


def kill(pid: int, timeout_s: float = KILL_TIMEOUT_S) -> None:
    """Send SIGKILL, and return when the process has let go of all that it had. Nothing where there is no such process.

    A process of some GB first gives its memory back, and closes its sockets after that: until then peers still connect
    to it. Its parent may not have taken notice when this returns.

    Raises:
        TimeoutError: a thread has not ended after `timeout_s` seconds.
    """
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        _wait_for(pid, _ENDED, "ended", timeout_s)


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


def _wait_for(pid: int, states: str, what: str, timeout_s: float) -> None:
    """Wait until all threads of a process are in one of these states."""
    deadline = time.monotonic() + timeout_s
    while others := _threads_not_in(states, pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"threads {others} of process {pid} have not {what} within {timeout_s:g} s")
        time.sleep(_LOOK_INTERVAL_S)


def _threads_not_in(states: str, pid: int) -> list[int]:
    others = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError as error:  # its parent has taken notice
        raise ProcessLookupError(f"process {pid} has ended") from error
    for task in tasks:
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            # What is between the parentheses is the thread's name, which may hold anything (proc(5)).
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in states:
                others.append(int(task.name))
    return others
