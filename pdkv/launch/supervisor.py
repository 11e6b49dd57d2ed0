"""Processes that start, are watched and end together."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pdkv.errors import ConfigError, LaunchError
from pdkv.launch.command import Command
from pdkv.launch.process import POLL_S, STOP_GRACE_S, ManagedProcess, Report, wait_ready
from pdkv.launch.settings import ENGINE_READY_TIMEOUT_S


def temporary_dir() -> Path:
    """A new name for a folder, which is not made yet: a dry run makes none."""
    return Path(tempfile.gettempdir()) / f"pdkv-{os.getpid()}-{secrets.token_hex(4)}"


def quiet(_: str) -> None:
    """A `report` that shows nothing."""


class Deployment:
    """Processes that start together, are watched together and end together.

    Args:
        stages: groups of commands; a group starts when all of the group before are ready.
        ready_timeout_s: seconds each group has until all of it answers ``/health``.
        log_dir: folder for one log per process; None makes one, removed again after a clean end.
        report: shown what happens, line by line.
        should_stop: asked while waiting; once it is true, waiting ends early.
        own_log_dir: the folder named by `log_dir` is this deployment's to make and to remove.
        grace_s: seconds that a process has from SIGTERM to SIGKILL.

    ``with`` starts and ends it. Whatever happens in between, no process is left.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Command]],
        *,
        ready_timeout_s: float = ENGINE_READY_TIMEOUT_S,
        log_dir: Path | None = None,
        report: Report = quiet,
        should_stop: Callable[[], bool] = lambda: False,
        own_log_dir: bool = False,
        grace_s: float = STOP_GRACE_S,
    ) -> None:
        self.stages = tuple(tuple(stage) for stage in stages)
        self.log_dir = log_dir if log_dir is not None else temporary_dir()
        self._own_log_dir = own_log_dir or log_dir is None
        self._ready_timeout_s = ready_timeout_s
        self._report = report
        self._should_stop = should_stop
        self._grace_s = grace_s
        self._processes: dict[str, ManagedProcess] = {}
        self._failed = False

    @property
    def commands(self) -> tuple[Command, ...]:
        """All commands in the order of their start."""
        return tuple(command for stage in self.stages for command in stage)

    def url_of(self, name: str) -> str:
        """Base URL of the process called `name`."""
        return self._command(name).url

    def log_path(self, name: str) -> Path:
        """Log file of the process called `name`."""
        return self.log_dir / f"{self._command(name).name}.log"

    def pid(self, name: str) -> int:
        """Pid above all processes of `name`, for measuring them. Raises LaunchError where it was not started."""
        pid = self._processes[name].pid if name in self._processes else None
        if pid is None:
            raise LaunchError(f"{self._command(name).name} has not been started.")
        return pid

    def start(self) -> None:
        """Start all and wait until all are ready.

        Raises:
            LaunchError: a process ended or missed its deadline. All of them have been ended then.
        """
        try:
            self._make_log_dir()
            for stage in self.stages:
                if self._should_stop():
                    return
                processes = [self._start_one(command) for command in stage]
                if not wait_ready(processes, self._ready_timeout_s, report=self._report, should_stop=self._should_stop):
                    return
        except BaseException:
            self._failed = True
            self.stop()
            raise

    def check(self) -> None:
        """Raise LaunchError where a process has ended."""
        for process in self._processes.values():
            try:
                process.check()
            except LaunchError:
                self._failed = True
                raise

    def run_until_stopped(self) -> None:
        """Watch the processes until `should_stop`; LaunchError where one ends before."""
        while not self._should_stop():
            self.check()
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End all processes and what they started, the last one first. Idempotent."""
        processes = list(reversed(self._processes.values()))
        for process in processes:
            process.request_stop()
        for process in processes:
            process.stop()
        self._processes.clear()
        if self._own_log_dir and not self._failed:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = self._failed or (error is not None and not isinstance(error, KeyboardInterrupt))
        self.stop()

    def _command(self, name: str) -> Command:
        for command in self.commands:
            if command.name == name:
                return command
        raise ConfigError(f"there is no {name!r} here; there are: {', '.join(c.name for c in self.commands)}.")

    def _make_log_dir(self) -> None:
        try:
            self.log_dir.mkdir(mode=0o700 if self._own_log_dir else 0o777, parents=True, exist_ok=not self._own_log_dir)
        except OSError as error:
            raise ConfigError(f"cannot make the log folder {self.log_dir}: {error.strerror}.") from error

    def _start_one(self, command: Command) -> ManagedProcess:
        process = ManagedProcess(command, self.log_path(command.name), grace_s=self._grace_s)
        self._processes[command.name] = process
        process.start()
        self._report(f"started {command.name}, log: {process.log_path}")
        return process
