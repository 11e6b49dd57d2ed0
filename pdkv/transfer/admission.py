"""How many requests may wait on D for KV from elsewhere, and how long the next one should stay away.

Each waiting request holds a lease on P, and in most engines destination blocks on D too, while it does no work. Without
a bound a burst fills both sides with requests that time out together. So D takes a fixed number and says how much room
there is; whoever routes requests answers 429 or 503 with Retry-After for the rest.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from pdkv.errors import CapacityError
from pdkv.transfer.clock import Clock
from pdkv.transfer.counters import Counters


@dataclass(frozen=True, slots=True)
class Room:
    """What D publishes: requests that wait now, the most that may, and seconds until trying again makes sense."""

    waiting: int
    capacity: int
    retry_after_s: int

    @property
    def free(self) -> int:
        """Requests that may come now."""
        return max(0, self.capacity - self.waiting)


class Admission:
    """The bounded set of requests that wait for remote KV."""

    #: How many of the last departures the estimate looks at, and the longest wait that it will ask for, in seconds.
    WINDOW = 32
    LONGEST_RETRY_S = 60

    def __init__(self, clock: Clock, counters: Counters, capacity: int = 64) -> None:
        if capacity < 1:
            raise CapacityError(f"admission needs room for at least 1 request, not {capacity}; raise the capacity.")
        self._clock = clock
        self._counters = counters
        self._capacity = capacity
        self._waiting: dict[str, None] = {}
        self._departures: deque[float] = deque(maxlen=self.WINDOW)

    def try_enter(self, request_id: str) -> bool:
        """Whether the request may wait; one that waits already may."""
        if request_id in self._waiting:
            return True
        if len(self._waiting) >= self._capacity:
            self._counters.count("refused_admissions")
            return False
        self._waiting[request_id] = None
        return True

    def leave(self, request_id: str) -> None:
        """Its KV has arrived, or it has ended. Idempotent."""
        if request_id in self._waiting:
            del self._waiting[request_id]
            self._departures.append(self._clock.monotonic())

    def room(self) -> Room:
        """What to tell the proxy."""
        return Room(len(self._waiting), self._capacity, self._retry_after_s())

    def _retry_after_s(self) -> int:
        """Mean time between the last departures: when one place will have become free. 0 where there is room."""
        if len(self._waiting) < self._capacity:
            return 0
        if len(self._departures) < 2:
            return 1
        span_s = self._clock.monotonic() - self._departures[0]
        return max(1, min(self.LONGEST_RETRY_S, math.ceil(span_s / (len(self._departures) - 1))))
