"""Runs random schedules for a while and adds up what came of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pdkv.testing.faults.plan import random_plan
from pdkv.testing.faults.simulation import Outcome, run

MAX_SHOWN = 5


@dataclass(slots=True)
class Totals:
    """Sums over schedules; see :class:`Outcome`. `shown` are the first bad schedules, as text."""

    schedules: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    wrong_tokens: int = 0
    stray_writes: int = 0
    leaked_blocks: int = 0
    stuck: int = 0
    crashes: int = 0
    shown: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Nothing that must not happen has happened."""
        return not (self.wrong_tokens or self.stray_writes or self.leaked_blocks or self.stuck or self.crashes)

    def add(self, number: int, outcome: Outcome) -> None:
        """One more schedule."""
        self.schedules += 1
        self.faults += outcome.faults
        self.requests += outcome.ended
        self.wrong_tokens += outcome.wrong_tokens
        self.stray_writes += outcome.stray_writes
        self.leaked_blocks += outcome.leaked_blocks
        self.stuck += len(outcome.stuck)
        self.crashes += bool(outcome.crash)
        if not outcome.is_good and len(self.shown) < MAX_SHOWN:
            self.shown.append(
                f"schedule {number} (random_plan({number})): {outcome.wrong_tokens} wrong tokens, "
                f"{outcome.stray_writes} stray writes, {outcome.leaked_blocks} leaked blocks, stuck: {outcome.stuck}"
                + (f"\n{outcome.crash}" if outcome.crash else "")
            )

    def as_dict(self, seconds: float, cpu_seconds: float) -> dict[str, object]:
        """As printed by ``--json``. `completed`: requests whose every token was decoded; `cpu_seconds`: of one core."""
        return {
            "schedules": self.schedules,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu_seconds, 1),
            "faults": {str(kind): count for kind, count in sorted(self.faults.items())},
            "completed": self.requests["completed"],
            "requests": dict(sorted(self.requests.items())),
            "wrong_tokens": self.wrong_tokens,
            "stray_writes": self.stray_writes,
            "leaked_blocks": self.leaked_blocks,
            "stuck": self.stuck,
            "crashes": self.crashes,
        }


def soak(seed: int, *, seconds: float = float("inf"), schedules: int | None = None) -> Totals:
    """Schedules `seed * 10**9` and on, until the time is over or so many have run."""
    totals = Totals()
    until = time.monotonic() + seconds
    number = seed * 10**9
    with _quiet():
        while time.monotonic() < until and (schedules is None or totals.schedules < schedules):
            totals.add(number, run(random_plan(number)))
            number += 1
    return totals


@contextmanager
def _quiet() -> Iterator[None]:
    """Faults are logged by the code under test; here they are on purpose."""
    logger = logging.getLogger("pdkv.transfer")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
