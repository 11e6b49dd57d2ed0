"""Virtual time: events in order of time, then of being planned. Nothing sleeps, and every run is repeatable."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class TooManyEventsError(Exception):
    """Something plans events without end: a deadline in the past, or a message that answers itself."""


class Wheel:
    """The events that are to come."""

    def __init__(self, max_events: int = 20_000) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0
        self._max_events = max_events

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Plan an event; one in the past happens now."""
        self._planned += 1
        heapq.heappush(self._heap, (max(time, self.now), self._planned, event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Plan an event `delay_s` seconds from now."""
        self.at(self.now + delay_s, event)

    def run(self, until: float) -> None:
        """Let events happen until there are none before `until`.

        Raises:
            TooManyEventsError: there is no end of them.
        """
        while self._heap and self._heap[0][0] <= until:
            self.now, planned, event = heapq.heappop(self._heap)
            if planned > self._max_events:
                raise TooManyEventsError(f"more than {self._max_events} events by {self.now:.1f} s of virtual time")
            event()


class WheelClock:
    """A process's own clock: it runs as the wheel does, from a start of its own."""

    def __init__(self, wheel: Wheel, offset_s: float = 0.0) -> None:
        self._wheel = wheel
        self.offset_s = offset_s

    def monotonic(self) -> float:
        return self._wheel.now + self.offset_s
