"""The bounded queue in front of the decode engines: a place with room, or an answer in time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pdkv.proxy.errors import no_room, too_many
from pdkv.proxy.rooms import FRESH_S, DecodeRoom, Place, ask_all, why_none_can_be_reached
from pdkv.proxy.settings import ProxySettings
from pdkv.proxy.upstream import Engine


class Queue:
    """Who may go on to prefill, in the order in which they came."""

    def __init__(self, settings: ProxySettings, decode: list[Engine]) -> None:
        self._settings = settings
        self.rooms = [DecodeRoom(engine) for engine in decode]
        self.under_way = 0
        self._waiting: deque[asyncio.Future[Place]] = deque()
        self._serving: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """One more request is under way within the block; ApiError 429 where there are too many."""
        if self.under_way >= self._settings.max_requests:
            raise too_many(
                f"this proxy serves {self._settings.max_requests} requests at once; try again in "
                f"{self._retry_after_s()} s.",
                self._retry_after_s(),
            )
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    async def place(self, timeout_s: float) -> Place:
        """A promise of room on a decode engine, waited for so long. The caller gives it up or keeps it.

        Raises:
            ApiError: 429 the queue is full; 503 no engine had room in time, or none can be reached.
        """
        if not self._waiting:
            await ask_all(self.rooms)
            if (place := self._first_with_room()) is not None:
                return place
            if (failure := why_none_can_be_reached(self.rooms)) is not None:
                raise failure
        if len(self._waiting) >= self._settings.max_queued:
            raise too_many(
                f"{self._settings.max_queued} requests wait for room on decode already; try again in "
                f"{self._retry_after_s()} s.",
                self._retry_after_s(),
            )
        return await self._wait(timeout_s)

    async def _wait(self, timeout_s: float) -> Place:
        turn: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        place: Place | None = None
        try:
            async with asyncio.timeout(timeout_s):
                place = await turn
            return place
        except TimeoutError:
            raise no_room(
                f"no decode engine had room within {timeout_s:g} s; try again in {self._retry_after_s()} s.",
                self._retry_after_s(),
            ) from None
        finally:
            if place is None:
                self._withdraw(turn)

    def _withdraw(self, turn: asyncio.Future[Place]) -> None:
        """Its time is over or its client has gone, possibly at the very moment at which its turn came."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            turn.result().give_up()

    async def _serve(self) -> None:
        """While anybody waits: ask for room, give it to the first in the queue."""
        while self._waiting:
            await ask_all(self.rooms)
            while self._waiting and self._serve_first():
                pass
            await asyncio.sleep(FRESH_S)

    def _serve_first(self) -> bool:
        """Whether the first in the queue could be told something."""
        turn = self._waiting[0]
        if turn.done():  # withdrawn, and about to leave the queue
            self._waiting.popleft()
            return True
        if (failure := why_none_can_be_reached(self.rooms)) is not None:
            turn.set_exception(failure)
        elif (place := self._first_with_room()) is not None:
            turn.set_result(place)
        else:
            return False
        self._waiting.popleft()
        return True

    def _first_with_room(self) -> Place | None:
        room = max(self.rooms, key=lambda room: (room.free, -room.engine.active))
        return room.promise() if room.free >= 1 else None

    def _retry_after_s(self) -> int:
        """The earliest time at which a decode engine expects room; at least 1 s."""
        reports = [room.report for room in self.rooms if room.report is not None]
        return max(1, min((report.retry_after_s for report in reports), default=1))
