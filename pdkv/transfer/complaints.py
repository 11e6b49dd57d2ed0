"""What was dropped, refused or failed because of others: always counted, and logged as often as someone can read."""

from __future__ import annotations

import logging

from pdkv.transfer.clock import Clock
from pdkv.transfer.counters import Counters

logger = logging.getLogger(__name__)


class Complaints:
    """Counts by name; of each name one line in `every_s` seconds is logged, with the count so far.

    Args:
        whose: begins each line.
    """

    def __init__(self, whose: str, counters: Counters, clock: Clock, every_s: float) -> None:
        self.counters = counters
        self._whose = whose
        self._clock = clock
        self._every_s = every_s
        self._next_at: dict[str, float] = {}

    def __call__(self, name: str, text: str) -> None:
        """Something named `name` happened; `text` is one sentence that says what."""
        self.counters.count(name)
        now = self._clock.monotonic()
        if now >= self._next_at.get(name, now):
            self._next_at[name] = now + self._every_s
            logger.warning("%s: %s (%s: %d so far)", self._whose, text, name, self.counters[name])
