"""Where the transfer code has the time from: injected, so that a test can wait ten minutes in no time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back. Two processes' clocks have nothing in common; only durations go over the wire."""

    def monotonic(self) -> float:
        """Seconds since some moment that no one else knows."""
        ...


class SystemClock:
    """The clock of a real process."""

    def monotonic(self) -> float:
        return time.monotonic()


def earliest(*deadlines: float | None) -> float | None:
    """The first of several deadlines; None where there is none."""
    return min((deadline for deadline in deadlines if deadline is not None), default=None)
