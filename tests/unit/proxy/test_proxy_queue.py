"""The queue for room on decode, by itself: nobody's place is lost, whenever a client leaves."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from unittest import mock

import pytest

from pdkv.proxy.errors import ApiError
from pdkv.proxy.queue import Queue
from pdkv.proxy.rooms import DecodeRoom, Report
from pdkv.proxy.settings import ProxySettings

pytestmark = pytest.mark.cpu

DEADLINE_S = 20.0


class KnownRoom(DecodeRoom):
    """A decode engine whose report is what the test says."""

    def __init__(self, free: int) -> None:
        super().__init__(mock.Mock(active=0))
        self.told = free

    async def _ask(self) -> None:
        self.report = Report(free=self.told, retry_after_s=3)
        self._asked_at = time.monotonic()


def queue_for(*rooms: DecodeRoom, **settings: Any) -> Queue:
    queue = Queue(ProxySettings(prefill_urls=("http://a:1",), decode_urls=("http://b:2",), **settings), [])
    queue.rooms = list(rooms)
    return queue


async def queued(queue: Queue, number: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while queue.waiting != number:
            await asyncio.sleep(0)


async def test_who_leaves_at_the_moment_its_turn_comes_gives_the_place_back() -> None:
    room = KnownRoom(0)
    queue = queue_for(room)
    waiter = asyncio.create_task(queue.place(20))
    await queued(queue, 1)
    room.report = Report(free=1)
    assert queue._serve_first()
    assert room.free == 0
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert room.free == 1


async def test_turns_come_in_the_order_of_arrival() -> None:
    room = KnownRoom(0)
    queue = queue_for(room)
    order: list[int] = []

    async def wait(number: int) -> None:
        await queue.place(20)
        order.append(number)

    waiters = []
    for number in range(5):
        waiters.append(asyncio.create_task(wait(number)))
        await queued(queue, number + 1)
    room.told = 5
    await asyncio.wait_for(asyncio.gather(*waiters), DEADLINE_S)
    assert order == [0, 1, 2, 3, 4]


async def test_those_who_withdrew_take_no_place_from_those_behind_them() -> None:
    room = KnownRoom(0)
    queue = queue_for(room)
    first, second = asyncio.create_task(queue.place(20)), asyncio.create_task(queue.place(20))
    await queued(queue, 2)
    first.cancel()
    room.told = 1
    place = await asyncio.wait_for(second, DEADLINE_S)
    assert room.free == 0
    place.give_up()
    place.give_up()
    assert room.free == 1
    assert queue.waiting == 0


async def test_a_place_that_was_used_counts_until_the_engine_has_reported_it() -> None:
    room = KnownRoom(2)
    queue = queue_for(room)
    place = await queue.place(20)
    place.sent()
    place.give_up()
    assert room.free == 1


async def test_when_the_last_engine_goes_all_who_wait_hear_of_it() -> None:
    room = KnownRoom(0)
    queue = queue_for(room)
    waiters = [asyncio.create_task(queue.place(20)) for _ in range(3)]
    await queued(queue, 3)
    room.failure = ApiError(503, "gone", kind="engine_error")
    room._ask = mock.AsyncMock()  # type: ignore[method-assign]
    results = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), DEADLINE_S)
    assert [result.status for result in results if isinstance(result, ApiError)] == [503] * 3
