"""One supervised process: started under a guard, its output in a log file, ended with all that it started."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from pdkv.errors import LaunchError
from pdkv.launch import guard
from pdkv.launch.command import Command
from pdkv.launch.diagnosis import clean, last_line, read_tail, root_cause

STOP_GRACE_S = 15.0  # an engine with requests in flight has ended within 5 s of SIGTERM; workers get the rest
HEALTH_TIMEOUT_S = 2.0
POLL_S = 0.2
REPORT_EVERY_S = 10.0
SHOWN_LINES = 8

Report = Callable[[str], None]


class Clock(Protocol):
    """What waits here, so that tests can turn the hands."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


class ManagedProcess:
    """A process of a deployment.

    Attributes:
        command: what was started.
        log_path: file with all its output and that of its children.
    """

    def __init__(self, command: Command, log_path: Path, *, grace_s: float = STOP_GRACE_S) -> None:
        self.command = command
        self.log_path = log_path
        self._grace_s = grace_s
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Pid of the guard; the engine's processes are all below it. None before the start."""
        return None if self._guard is None else self._guard.pid

    def start(self) -> None:
        """Start it in a session of its own, so that ctrl-C in the terminal reaches the launcher alone.

        The output goes straight into the file: no pipe that fills up, and nothing lost when the launcher is killed.

        Raises:
            LaunchError: the log cannot be written, or the system starts no further process.
        """
        argv = [sys.executable, "-P", guard.__file__, "--parent", str(os.getpid()), "--grace", f"{self._grace_s:g}"]
        try:
            with self.log_path.open("wb") as log:
                self._guard = subprocess.Popen(
                    [*argv, "--", *self.command.argv],
                    env=self.command.environment(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(
                f"cannot start {self.command.name} with its log in {self.log_path}: {error.strerror or error}."
            ) from error

    def poll(self) -> int | None:
        """Exit code of the process as a shell counts it (128 + signal), or None while it runs."""
        if self._guard is None:
            return None
        code = self._guard.poll()
        if code is not None and code < 0:  # the guard itself was killed; its group is the engine's
            kill_group(self._guard.pid)
            return 128 - code
        return code

    def request_stop(self) -> None:
        """Ask it to end. Returns at once; :meth:`stop` waits."""
        if self._guard is not None and self._guard.poll() is None:
            self._guard.send_signal(signal.SIGTERM)
            self._guard.send_signal(signal.SIGCONT)  # a stopped one would not see the other before the limit

    def stop(self) -> int | None:
        """End it and everything it started; returns its exit code, None where it was never started."""
        if self._guard is None:
            return None
        self.request_stop()
        limit_s = self._grace_s + guard.STRAGGLER_GRACE_S + guard.KILL_TIMEOUT_S + 2.0
        try:
            self._guard.wait(limit_s)
        except subprocess.TimeoutExpired:
            kill_group(self._guard.pid)
            with suppress(subprocess.TimeoutExpired):
                self._guard.wait(2.0)
        return self.poll()

    def healthy(self) -> bool:
        """Whether ``/health`` answers 200 now."""
        return probe(self.command.url, HEALTH_TIMEOUT_S) == 200

    def check(self) -> None:
        """Raise LaunchError where the process has ended."""
        if (code := self.poll()) is not None:
            raise LaunchError(self.describe_end(code))

    def describe_end(self, code: int) -> str:
        """What ended it: one sentence with the root cause, then the last lines of its log."""
        lines = read_tail(self.log_path)
        cause = root_cause(lines)
        how = f"was killed by {signal_name(code - 128)}" if code > 128 else f"ended with exit code {code}"
        sentence = f"{self.command.name} {how}"
        if cause is not None:
            return f"{sentence}: {cause}\n  log: {self.log_path}"
        if code == 128 + signal.SIGKILL:
            sentence += "; where nobody did that on purpose, the machine ran out of memory (see dmesg)"
        shown = "".join(f"\n  | {text}" for line in lines[-SHOWN_LINES:] if (text := clean(line).rstrip()))
        return f"{sentence}. Last lines of {self.log_path}:{shown or ' (empty)'}"


def wait_ready(
    processes: list[ManagedProcess],
    timeout_s: float,
    *,
    report: Report,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Clock = time,
) -> bool:
    """Wait until all answer ``/health``, saying every few seconds what is still awaited.

    Returns:
        False where `should_stop` became true first.

    Raises:
        LaunchError: one of them ended, or the time is over.
    """
    began = reported = clock.monotonic()
    waiting = list(processes)
    while True:
        for process in list(waiting):
            process.check()
            if process.healthy():
                waiting.remove(process)
                report(f"{process.command.name} is ready at {process.command.url} ({clock.monotonic() - began:.0f} s)")
        if not waiting:
            return True
        if should_stop():
            return False
        now = clock.monotonic()
        if now - began >= timeout_s:
            raise LaunchError(_describe_timeout(waiting[0], timeout_s))
        if now - reported >= REPORT_EVERY_S:
            reported = now
            for process in waiting:
                report(_describe_wait(process, now - began, timeout_s))
        clock.sleep(POLL_S)


def probe(url: str, timeout_s: float) -> int | None:
    """Status of ``GET url/health``; None where nothing answers in time. Ignores proxies set in the environment."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def kill_group(pgid: int) -> None:
    """SIGKILL to every process of the group, where there is one."""
    with suppress(ProcessLookupError):
        os.killpg(pgid, signal.SIGKILL)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _describe_wait(process: ManagedProcess, waited_s: float, timeout_s: float) -> str:
    doing = last_line(process.log_path) or "(no output yet)"
    name, url = process.command.name, process.command.url
    return f"waiting for {name} at {url}/health, {waited_s:.0f} s of {timeout_s:g} s; its last line: {doing[:100]}"


def _describe_timeout(process: ManagedProcess, timeout_s: float) -> str:
    shown = "".join(f"\n  | {clean(line)}" for line in read_tail(process.log_path)[-SHOWN_LINES:])
    return (
        f"{process.command.name} did not answer {process.command.url}/health within {timeout_s:g} s; raise "
        f"--ready-timeout, or see what it does in {process.log_path}:{shown or ' (empty)'}"
    )
