"""Which decode engine gets the next request, and who waits until one has room.

Each decode engine says how many requests it lets wait for KV (``GET /pdkv/room``). The proxy asks before it spends any
prefill work, counts what it has promised since, and keeps a bounded queue with a deadline for the rest. Other proxies
may take the room meanwhile: the engine then refuses by itself, after prefill.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque

import msgspec

from pdkv.proxy.answers import raise_for_status, read_json
from pdkv.proxy.errors import DOWN_RETRY_S, ApiError, engine_error
from pdkv.proxy.upstream import PROBE_TIMEOUT_S, Engine

logger = logging.getLogger("pdkv.proxy")

#: A report is good for so long. An engine that was not reached, or has no admission, is asked again after so long.
FRESH_S = 0.1
ASK_AGAIN_S = 1.0
# A request that was sent to decode so shortly before it reported may not be in the report.
_ON_ITS_WAY_S = 0.25


class Report(msgspec.Struct):
    """What a decode engine says of its room, as far as it is needed here."""

    free: int
    free_blocks: int | None = None
    retry_after_s: int = 0


class DecodeRoom:
    """The room of one decode engine as the proxy knows it.

    Attributes:
        report: what it said last; None before it did, and where it has no admission (a stock engine).
        failure: why it could not be asked, or None.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.report: Report | None = None
        self.failure: ApiError | None = None
        self._asked_at = -math.inf
        self._promised = 0
        self._sent: deque[float] = deque()
        self._asking: asyncio.Task[None] | None = None

    @property
    def free(self) -> float:
        """Requests that may be promised a place now; infinite where the engine sets no limit."""
        if self.failure is not None:
            return 0
        if self.report is None:
            return math.inf
        return 0 if self.report.free_blocks == 0 else self.report.free - self._promised - len(self._sent)

    @property
    def is_fresh(self) -> bool:
        good_s = FRESH_S if self.report is not None and self.failure is None else ASK_AGAIN_S
        return time.monotonic() - self._asked_at < good_s

    def promise(self) -> Place:
        self._promised += 1
        return Place(self)

    def kept(self, *, sent: bool) -> None:
        """A promise is over: the request is on its way to the engine, or will never be."""
        self._promised -= 1
        if sent and self.report is not None:
            self._sent.append(time.monotonic())

    def ask(self) -> asyncio.Task[None]:
        """What ends with a fresh report, or a failure. However many wait for it, one question is on its way."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    async def _ask(self) -> None:
        began = time.monotonic()
        try:
            async with self.engine.request("GET", "/pdkv/room", timeout_s=PROBE_TIMEOUT_S) as response:
                content = await response.read()
                if response.status == 404:
                    self._has_no_limit()
                else:
                    raise_for_status(self.engine, response, content)
                    self.report = read_json(content, Report)
            self.failure = None
        except msgspec.DecodeError as error:
            self.failure = engine_error(503, f"{self.engine.name} says of its room what cannot be read: {error}")
        except ApiError as error:
            self.failure = error
        self._asked_at = time.monotonic()
        while self._sent and self._sent[0] < began - _ON_ITS_WAY_S:
            self._sent.popleft()

    def _has_no_limit(self) -> None:
        if self._asked_at == -math.inf:
            logger.warning("%s has no admission (/pdkv/room): it is sent all requests at once", self.engine.name)
        self.report = None


class Place:
    """A promise that a decode engine will have room, until the request is sent there or given up."""

    def __init__(self, room: DecodeRoom) -> None:
        self._room: DecodeRoom | None = room
        self.engine = room.engine

    def sent(self) -> None:
        """The request is on its way: from now on the engine counts it."""
        self._end(sent=True)

    def give_up(self) -> None:
        """Idempotent; does nothing once sent."""
        self._end(sent=False)

    def _end(self, *, sent: bool) -> None:
        if self._room is not None:
            self._room.kept(sent=sent)
            self._room = None


async def ask_all(rooms: list[DecodeRoom]) -> None:
    """Fresh reports from all that can be reached. One that could not be is asked in passing: it delays nobody."""
    stale = [room for room in rooms if not room.is_fresh]
    awaited = [room for room in stale if room.failure is None]
    if not awaited and all(room.failure is not None for room in rooms):
        awaited = stale
    asked = {room: room.ask() for room in stale}
    if awaited:
        await asyncio.wait([asked[room] for room in awaited])


def why_none_can_be_reached(rooms: list[DecodeRoom]) -> ApiError | None:
    """503 where not one decode engine can be asked, else None."""
    failures = [room.failure for room in rooms]
    if any(failure is None for failure in failures):
        return None
    return engine_error(503, "; ".join(str(failure) for failure in failures), DOWN_RETRY_S)
