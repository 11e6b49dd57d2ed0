"""How many requests may wait on D for KV from elsewhere, and how long the next one should stay away.

Each waiting request holds a lease on P, and in most engines destination blocks on D too, while it does no work. Without
a bound a burst fills both sides with requests that time out together. So D takes a fixed number, and a fixed number of
their blocks, and says how much room there is; whoever routes requests answers 429 or 503 with Retry-After for the rest.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from pdkv.errors import CapacityError
from pdkv.transfer.clock import Clock
from pdkv.transfer.counters import Counters

Limit = Literal["requests", "blocks"]


@dataclass(frozen=True, slots=True)
class Room:
    """What D publishes.

    Attributes:
        waiting, capacity: requests that wait now, and the most that may.
        retry_after_s: seconds until trying again makes sense; 0 where there is room now.
        waiting_blocks, capacity_blocks: blocks of those requests' prompts, and the most that they may have; None is no
            limit.
    """

    waiting: int
    capacity: int
    retry_after_s: int
    waiting_blocks: int = 0
    capacity_blocks: int | None = None

    @property
    def free(self) -> int:
        """Requests that may come now."""
        return max(0, self.capacity - self.waiting)

    @property
    def free_blocks(self) -> int | None:
        """Blocks that their prompts may have; None is no limit."""
        return None if self.capacity_blocks is None else max(0, self.capacity_blocks - self.waiting_blocks)


class Admission:
    """The bounded set of requests that wait for remote KV."""

    #: How many of the last departures the estimate looks at, and the longest wait that it will ask for, in seconds.
    WINDOW = 32
    LONGEST_RETRY_S = 60

    def __init__(
        self, clock: Clock, counters: Counters, capacity: int = 64, capacity_blocks: int | None = None
    ) -> None:
        if capacity < 1 or (capacity_blocks is not None and capacity_blocks < 1):
            raise CapacityError(
                f"admission needs room for at least 1 request and 1 block, not {capacity} and {capacity_blocks}; raise "
                "the capacity."
            )
        self._clock = clock
        self._counters = counters
        self._capacity = capacity
        self._capacity_blocks = capacity_blocks
        self._waiting: dict[str, int] = {}
        self._elsewhere = (0, 0)
        self._departures: deque[float] = deque(maxlen=self.WINDOW)

    def limit_hit(self, num_blocks: int = 0) -> Limit | None:
        """Which limit keeps out one more request whose prompt has so many blocks; None where there is room.

        Where nothing waits there is room for any request, since waiting would not help it.
        """
        room = self.room()
        if room.waiting == 0:
            return None
        if room.free == 0:
            return "requests"
        return None if room.free_blocks is None or num_blocks <= room.free_blocks else "blocks"

    def try_enter(self, request_id: str, num_blocks: int = 0) -> bool:
        """Whether the request may wait; one that waits already may."""
        if request_id in self._waiting:
            return True
        if self.limit_hit(num_blocks) is not None:
            self._counters.count("refused_admissions")
            return False
        self._waiting[request_id] = num_blocks
        return True

    def leave(self, request_id: str) -> None:
        """Its KV has arrived, or it has ended. Idempotent."""
        if request_id in self._waiting:
            del self._waiting[request_id]
            self._departures.append(self._clock.monotonic())

    def set_elsewhere(self, requests: int, blocks: int) -> None:
        """So many requests wait, with so many blocks, that did not come through here; they count as well."""
        self._elsewhere = (requests, blocks)

    def room(self) -> Room:
        """What to tell the proxy."""
        waiting = len(self._waiting) + self._elsewhere[0]
        blocks = sum(self._waiting.values()) + self._elsewhere[1]
        is_full = waiting >= self._capacity or (self._capacity_blocks is not None and blocks >= self._capacity_blocks)
        return Room(waiting, self._capacity, self.retry_after_s() if is_full else 0, blocks, self._capacity_blocks)

    def retry_after_s(self) -> int:
        """Mean time between the last departures, at least 1 s: when one place will have become free."""
        if len(self._departures) < 2:
            return 1
        span_s = self._clock.monotonic() - self._departures[0]
        return max(1, min(self.LONGEST_RETRY_S, math.ceil(span_s / (len(self._departures) - 1))))
