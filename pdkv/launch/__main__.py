"""``python -m pdkv.launch``: start engines and proxy, watch over them, end them.

Exit codes: 0 ended on request (SIGTERM, SIGHUP) or dry run; 1 a process did not start or died; 2 a setting is wrong and
nothing was started; 130 ended by ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from pdkv.errors import ConfigError, PdkvError
from pdkv.launch.cli import build, parse
from pdkv.launch.supervisor import Deployment

EXIT_ENGINE_FAILED = 1
EXIT_BAD_SETTINGS = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


class StopRequest:
    """The signal that asked the program to end, if any. Handlers only note it: the loops that wait look here."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __call__(self) -> bool:
        return self.signum is not None

    def install(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum


def say(text: str) -> None:
    """One line for the user. Standard output is left to what scripts read."""
    print(text, file=sys.stderr, flush=True)


def show_ready(deployment: Deployment) -> None:
    """The addresses, for people and for scripts that wait for the line."""
    for command in deployment.commands:
        print(f"{command.name} {command.url}", flush=True)
    say("ready; ctrl-C ends everything")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    stop = StopRequest()
    stop.install()
    try:
        request = parse(sys.argv[1:] if argv is None else argv)
        deployment = build(request, say, stop)
        if request.dry_run:
            for command in deployment.commands:
                print(f"# {command.name}\n{command.shell()}")
            return 0
        with deployment:
            if not stop():
                show_ready(deployment)
                deployment.run_until_stopped()
            say("ending all processes")
    except ConfigError as error:
        say(f"error: {error}")
        return EXIT_BAD_SETTINGS
    except PdkvError as error:
        say(f"error: {error}")
        return EXIT_ENGINE_FAILED
    return EXIT_INTERRUPTED if stop.signum == signal.SIGINT else 0


if __name__ == "__main__":
    sys.exit(main())
