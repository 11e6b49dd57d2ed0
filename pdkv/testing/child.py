"""Child processes that answer commands: one JSON object a line in, one a line out.

The parent's half is :class:`Child`; the child's half is :func:`serve`. Replies go to a file descriptor of their own,
named by the child's first argument, since libraries write to standard output and error. Binary values travel as hex.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

#: A command that computes for milliseconds may wait this long for a core of a busy machine.
REPLY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0


class ChildError(Exception):
    """The child answered with an exception; it is still there.

    Attributes:
        kind: the name of the exception's class.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class ChildEnded(Exception):
    """The child ended instead of answering; the message holds its exit status and the end of its log."""


class ChildProcess(Protocol):
    """What is used of :class:`subprocess.Popen`, which is one, and means the same here."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Start:
    """What a child is started with.

    Attributes:
        program: a script, or a module's name.
        environment: all of it.
        input_fd, output_fd, reply_fd: standard input; standard output and error; where replies go.
    """

    program: Path | str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    input_fd: int
    output_fd: int
    reply_fd: int


class Child:
    """A Python program that runs :func:`serve`, ended when the context is left.

    Args:
        program: the file to run, or the name of a module.
        log: where its standard output and error go.
        arguments: command line after the reply descriptor.
        environment: variables on top of this process's own.
    """

    def __init__(
        self, program: Path | str, log: Path, *arguments: str, environment: dict[str, str] | None = None
    ) -> None:
        reply_fd, child_fd = os.pipe()
        input_fd, command_fd = os.pipe()
        self.log = log
        self._commands = os.fdopen(command_fd, "w")
        self._replies = os.fdopen(reply_fd, "rb", buffering=0)
        self._buffer = b""
        try:
            with log.open("w") as output:
                variables = {**os.environ, **(environment or {})}
                self.process = self._start(Start(program, arguments, variables, input_fd, output.fileno(), child_fd))
        finally:
            os.close(input_fd)
            os.close(child_fd)

    def _start(self, start: Start) -> ChildProcess:
        """Start a program in a process of its own; the descriptors stay the caller's to close."""
        program = ["-m", start.program] if isinstance(start.program, str) else [str(start.program)]
        return subprocess.Popen(
            [sys.executable, *program, str(start.reply_fd), *start.arguments],
            stdin=start.input_fd,
            stdout=start.output_fd,
            stderr=subprocess.STDOUT,
            pass_fds=[start.reply_fd],
            env=start.environment,
        )

    def ask(self, do: str, timeout_s: float = REPLY_TIMEOUT_S, **arguments: Any) -> Any:
        """Run one command and return its reply.

        Raises:
            ChildError: the command raised.
            ChildEnded: the process ended.
            TimeoutError: no reply in time.
        """
        self.send(do, **arguments)
        return self.reply(timeout_s)

    def send(self, do: str, **arguments: Any) -> None:
        """Begin one command; its reply is asked for later.

        Raises:
            ChildEnded: the process ended.
        """
        try:
            print(json.dumps({"do": do, **arguments}), file=self._commands, flush=True)
        except BrokenPipeError:
            raise self._ended() from None

    def reply(self, timeout_s: float = REPLY_TIMEOUT_S) -> Any:
        """The reply to the oldest command that has none yet; see :meth:`ask`."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                raise TimeoutError(f"no reply in {timeout_s} s; log:\n{self.tail()}")
            data = self._replies.read(65536)
            if not data:
                raise self._ended()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"], answer["message"])
        return answer["reply"]

    def wait(self, timeout_s: float = REPLY_TIMEOUT_S) -> int:
        """Wait for the process to end by itself; its exit status, negative for a signal."""
        return self.process.wait(timeout_s)

    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def tail(self, lines: int = 40) -> str:
        """The end of the child's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def end(self) -> None:
        """Have the process end by itself, which :meth:`close` waits for: it gets end of input."""
        with suppress(BrokenPipeError):
            self._commands.close()

    def close(self) -> None:
        """End the process: it gets end of input, and is killed where that is not enough."""
        self.end()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_TIMEOUT_S)
        self._replies.close()

    def _ended(self) -> ChildEnded:
        return ChildEnded(f"exit status {self.process.wait(END_TIMEOUT_S)}; log:\n{self.tail()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(
    target: object,
    reply_fd: int,
    idle: Callable[[], None],
    idle_interval_s: float = 0.002,
    before_each: Callable[[], None] = lambda: None,
) -> None:
    """Answer commands from standard input with the ``do_*`` methods of `target` until the input ends.

    Between commands `idle` is called every `idle_interval_s` seconds. It is what serves peers in a program without
    threads of its own. Who asks again and again keeps it from being called, but not `before_each`, which comes before
    each command.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some children are meant to crash
    commands = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    pending = b""
    with os.fdopen(reply_fd, "w") as replies:
        while True:
            if not select.select([commands], [], [], idle_interval_s)[0]:
                idle()
                continue
            data = commands.read(1 << 20)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                before_each()
                print(json.dumps(_answer(target, json.loads(line))), file=replies, flush=True)


def _answer(target: object, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"reply": getattr(target, "do_" + command.pop("do"))(**command)}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
