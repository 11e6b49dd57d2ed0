"""What the harness's programs have in common: exit codes, and how they end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from pdkv.errors import ConfigError, PdkvError

EXIT_PASSED = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_CARRIED_OUT = 3


def run_program(run: Callable[[], dict[str, Any]]) -> int:
    """Call `run`, which returns a report with the key `passed`, and return the exit code.

    A signal that asks the process to end does so by an exception, so that all that `run` has started is ended with it.
    """
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stop)
    try:
        report = run()
    except ConfigError as error:
        say(f"error: {error}")
        return EXIT_BAD_INPUT
    except PdkvError as error:
        say(f"error: {error}")
        return EXIT_NOT_CARRIED_OUT
    except KeyboardInterrupt:
        say("interrupted; all processes that were started have been ended")
        return 128 + signal.SIGINT
    return EXIT_PASSED if report["passed"] else EXIT_FAILED


def say(text: str) -> None:
    """To people, who read standard error; standard output has the result."""
    print(text, file=sys.stderr, flush=True)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
