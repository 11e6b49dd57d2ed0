"""``python -m pdkv.launch``: start engines and proxy, watch over them, end them.

Exit codes: 0 ended on request (SIGTERM, SIGHUP) or dry run; 1 a process did not start or died; 2 a setting is wrong and
nothing was started; 130 ended by ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from pdkv.errors import ConfigError, LaunchError, PdkvError
from pdkv.launch.cli import build, parse
from pdkv.launch.supervisor import Deployment

EXIT_ENGINE_FAILED = 1
EXIT_BAD_SETTINGS = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


class StopRequest:
    """The signal that asked the program to end, if any. Handlers only note it: the loops that wait look here.

    Signals are noted within its ``with`` block; afterwards the handlers are what they were.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._handlers: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.signum is not None

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._handlers[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum


def say(text: str) -> None:
    """One line for the user. Standard output is left to what scripts read.

    Where nobody can be told any more (a closed terminal, a full disk), engines that serve are not ended for it.
    """
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def show_ready(deployment: Deployment) -> None:
    """The addresses, for people and for scripts that wait for the line; LaunchError where they cannot be written."""
    try:
        for command in deployment.commands:
            print(f"{command.name} {command.url}", flush=True)
    except OSError as error:
        raise LaunchError(f"cannot write the addresses to standard output: {error.strerror}.") from error
    say("ready; ctrl-C ends everything")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    try:
        with StopRequest() as stop:
            return run(sys.argv[1:] if argv is None else argv, stop)
    except ConfigError as error:
        say(f"error: {error}")
        return EXIT_BAD_SETTINGS
    except PdkvError as error:
        say(f"error: {error}")
        return EXIT_ENGINE_FAILED


def run(argv: Sequence[str], stop: StopRequest) -> int:
    """Start what `argv` asks for and watch over it until `stop`; returns the exit code. PdkvError where that fails."""
    request = parse(argv)
    deployment = build(request, say, stop)
    if request.dry_run:
        try:
            for command in deployment.commands:
                print(f"# {command.name}\n{command.shell()}", flush=True)
        except OSError as error:
            raise LaunchError(f"cannot write the commands to standard output: {error.strerror}.") from error
        return 0
    with deployment:
        if not stop():
            show_ready(deployment)
            deployment.run_until_stopped()
        say("ending all processes")
    return EXIT_INTERRUPTED if stop.signum == signal.SIGINT else 0


if __name__ == "__main__":
    sys.exit(main())
