"""Engines for tests as forks of one process that has imported vLLM, which takes longer than all else of their start.

A fork is what a fresh process would be, as far as these tests look, but for two things: what was read from the
environment while vLLM was imported, and memory, of which it shares with others what was imported. `Zygote.suits` tells
for which environments that makes no difference.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from pdkv.testing.child import Start

_MAIN = Path(__file__).with_name("zygote_main.py")
END_TIMEOUT_S = 20.0
#: Importing vLLM on a machine that does other things too.
START_TIMEOUT_S = 300.0

#: Variables that are read only when an engine starts, so that a fork may have others than the process that imported
#: vLLM, in which there is neither pdkv nor UCX. Not `PDKV_ENGINE_MEMORY`, with which an engine measures how much memory
#: is its own. pytest's own is read by nobody.
READ_LATE = re.compile(
    r"PDKV_(?!ENGINE_MEMORY$)\w+ | UCX_\w+ | VLLM_NIXL_SIDE_CHANNEL_(HOST|PORT) | PYTEST_CURRENT_TEST", re.VERBOSE
)


class ForkedProcess:
    """A child of the zygote; all that `subprocess.Popen` has of these names means the same here."""

    def __init__(self, status_fd: int, why_gone: Callable[[], Exception]) -> None:
        self._status_fd = status_fd
        self._why_gone = why_gone
        self._buffer = b""
        self.returncode: int | None = None
        self.pid = self._number(START_TIMEOUT_S)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        if self.returncode is None:
            self.returncode = self._number(timeout)
            os.close(self._status_fd)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _number(self, timeout: float | None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._status_fd], [], [], left)[0]:
                raise subprocess.TimeoutExpired("a fork of the zygote", timeout or 0.0)
            data = os.read(self._status_fd, 64)
            if not data:
                raise self._why_gone()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return int(line)


class Zygote:
    """A process that forks engines, started when the first one is asked for, ended when the context is left.

    Args:
        log: where its own output goes.
        variables: what all engines have in their environment, on top of this process's.
    """

    def __init__(self, log: Path, variables: Mapping[str, str]) -> None:
        self._log = log
        self._environment = {**os.environ, **variables}
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork can have this environment and be no other than a fresh process with it."""
        ours = self._environment
        differing = {name for name in {*ours, *environment} if ours.get(name) != environment.get(name)}
        return all(name in environment and READ_LATE.fullmatch(name) for name in differing)

    def fork(self, start: Start) -> ForkedProcess:
        """Run a script in a fork, as ``python script REPLY_FD arguments``; in an environment that `suits`."""
        request = {
            "program": str(start.program),
            "arguments": start.arguments,
            "folder": os.getcwd(),
            "variables": {name: value for name, value in start.environment.items() if READ_LATE.fullmatch(name)},
        }
        requests = self._started()
        status_fd, child_fd = os.pipe()
        try:
            socket.send_fds(
                requests, [json.dumps(request).encode()], [start.input_fd, start.output_fd, start.reply_fd, child_fd]
            )
        except OSError:
            os.close(status_fd)
            raise self._why_gone() from None
        finally:
            os.close(child_fd)
        return ForkedProcess(status_fd, self._why_gone)

    def _why_gone(self) -> Exception:
        """What a fork raises whose zygote is gone; what that said last."""
        if self._process is not None:
            self._process.wait(END_TIMEOUT_S)
        return RuntimeError(f"the zygote has ended; its log:\n{self._log.read_text(errors='replace')}")

    def _started(self) -> socket.socket:
        if self._requests is None:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, self._log.open("w") as output:
                self._process = subprocess.Popen(
                    [sys.executable, str(_MAIN), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env=self._environment,
                )
        return self._requests

    def close(self) -> None:
        """End the process; forks end with their own input."""
        if self._requests is not None and self._process is not None:
            self._requests.close()
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(END_TIMEOUT_S)
        self._requests = self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
