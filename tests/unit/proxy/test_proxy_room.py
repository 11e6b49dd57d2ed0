"""Which decode engine gets a request, who waits for room, who is sent away, and what is told when a client leaves."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from fake_pd_engines import (
    DEADLINE_S,
    HANDED_OVER,
    FakeEngine,
    dead_engine,
    engine,
    get,
    hang,
    post,
    prefill_engine,
    running,
    wait_until,
)

pytestmark = pytest.mark.cpu

ANSWER = {"id": "cmpl-1", "choices": [{"text": " Paris"}]}


def decode_engine(free: int | None) -> FakeEngine:
    fake = engine(ANSWER)
    fake.free = free
    return fake


def ask(url: str) -> tuple[int, Any, Any]:
    return post(f"{url}/v1/completions", {"prompt": "a"})


def in_background(pool: ThreadPoolExecutor, url: str) -> Future[tuple[int, Any, Any]]:
    return pool.submit(ask, url)


def queued(url: str) -> int:
    return int(get(f"{url}/pdkv/status")["queued"])


def test_without_room_on_decode_no_prefill_work_is_spent_until_there_is_room():
    prefill, decode = prefill_engine(), decode_engine(0)
    with running(prefill, decode) as url, ThreadPoolExecutor() as pool:
        answer = in_background(pool, url)
        wait_until(lambda: queued(url) == 1)
        assert prefill.bodies == []
        decode.free = 1
        assert answer.result(DEADLINE_S)[0] == 200
    assert len(prefill.bodies) == 1


def test_who_finds_no_room_in_time_is_503_and_hears_when_decode_expects_some():
    prefill, decode = prefill_engine(), decode_engine(0)
    with running(prefill, decode, queue_timeout_s=0.2) as url:
        status, headers, body = ask(url)
        assert get(f"{url}/pdkv/status")["queued"] == 0
    assert (status, headers["Retry-After"], body["error"]["type"]) == (503, "7", "no_room")
    assert prefill.bodies == decode.bodies == []


def test_a_full_queue_is_429_at_once():
    with running(prefill_engine(), decode := decode_engine(0), max_queued=1) as url, ThreadPoolExecutor() as pool:
        first = in_background(pool, url)
        wait_until(lambda: queued(url) == 1)
        status, headers, body = ask(url)
        assert (status, headers["Retry-After"], body["error"]["type"]) == (429, "7", "too_many_requests")
        decode.free = 1
        assert first.result(DEADLINE_S)[0] == 200


def test_too_many_requests_under_way_are_429_and_one_that_ends_makes_room():
    stopped = threading.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.Response:
        await asyncio.to_thread(stopped.wait, DEADLINE_S)
        return web.json_response(ANSWER)

    decode = FakeEngine(slow)
    with running(prefill_engine(), decode, max_requests=1) as url, ThreadPoolExecutor() as pool:
        first = in_background(pool, url)
        assert decode.started.wait(DEADLINE_S)
        status, headers, _ = ask(url)
        assert (status, headers["Retry-After"]) == (429, "1")
        stopped.set()
        assert first.result(DEADLINE_S)[0] == 200
        assert ask(url)[0] == 200


def test_a_stream_is_under_way_until_it_ends():
    ended = threading.Event()

    async def stream(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: a\n\n")
        await asyncio.to_thread(ended.wait, DEADLINE_S)
        return response

    with running(prefill_engine(), FakeEngine(stream)) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
        connection.request("POST", "/v1/completions", b'{"prompt": "a", "stream": true}')
        response = connection.getresponse()
        assert response.read(9) == b"data: a\n\n"
        assert get(f"{url}/pdkv/status")["under_way"] == 1
        ended.set()
        response.read()
        wait_until(lambda: get(f"{url}/pdkv/status")["under_way"] == 0)
        connection.close()


def test_the_decode_engine_with_more_room_gets_the_request():
    full, small, large = decode_engine(0), decode_engine(1), decode_engine(5)
    with running(prefill_engine(), full, small, large) as url:
        assert ask(url)[0] == 200
    assert [len(fake.bodies) for fake in (full, small, large)] == [0, 0, 1]


def test_room_that_was_promised_is_not_promised_again_while_prefill_computes():
    may_finish = threading.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.Response:
        await asyncio.to_thread(may_finish.wait, DEADLINE_S)
        return web.json_response({"kv_transfer_params": HANDED_OVER})

    prefill, decode = FakeEngine(slow), decode_engine(1)
    with running(prefill, decode) as url, ThreadPoolExecutor() as pool:
        first = in_background(pool, url)
        assert prefill.started.wait(DEADLINE_S)
        second = in_background(pool, url)
        wait_until(lambda: queued(url) == 1)
        asked = decode.rooms_asked
        wait_until(lambda: decode.rooms_asked > asked + 1)
        assert len(prefill.bodies) == 1
        may_finish.set()
        assert [answer.result(DEADLINE_S)[0] for answer in (first, second)] == [200, 200]


def test_a_decode_engine_that_is_down_is_passed_over():
    alive = decode_engine(3)
    with running(prefill_engine(), dead_engine(), alive) as url:
        assert [ask(url)[0] for _ in range(3)] == [200] * 3
    assert len(alive.bodies) == 3


def test_a_prefill_engine_that_is_down_is_passed_over():
    alive = prefill_engine()
    with running(dead_engine(), alive, decode_engine(3), num_prefill=2) as url:
        assert [ask(url)[0] for _ in range(3)] == [200] * 3
    assert len(alive.bodies) == 3


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_that_is_down_is_503_with_a_time_to_come_back_and_the_proxy_stays_healthy(side: str):
    prefill, decode = prefill_engine(), decode_engine(2)
    engines = (dead_engine(), decode) if side == "prefill" else (prefill, dead_engine())
    with running(*engines) as url:
        status, headers, body = ask(url)
        assert (status, int(headers["Retry-After"]) > 0) == (503, True)
        assert f"the {side} engine at" in body["error"]["message"]
        assert get(f"{url}/health") == {"status": "ok"}
    assert prefill.bodies == decode.bodies == []


def test_a_decode_engine_that_stops_answering_is_503_and_no_prefill_work_is_spent():
    prefill, decode = prefill_engine(), decode_engine(None)
    stopped = threading.Event()

    async def silent(request: web.Request) -> web.Response:
        await asyncio.to_thread(stopped.wait, DEADLINE_S)
        return web.Response()

    decode.tell_room = silent  # type: ignore[method-assign]
    with running(prefill, decode) as url:
        began = time.monotonic()
        assert ask(url)[0] == 503
        assert ask(url)[0] == 503
        assert time.monotonic() - began < DEADLINE_S / 2
        stopped.set()
    assert prefill.bodies == []


def test_a_decode_engine_that_is_asleep_is_503_in_its_own_words_and_no_prefill_work_is_spent():
    async def asleep(request: web.Request) -> web.Response:
        error = {"message": "the engine is asleep", "type": "asleep", "code": 503}
        return web.json_response({"error": error}, status=503, headers={"Retry-After": "5"})

    prefill, decode = prefill_engine(), decode_engine(3)
    decode.tell_room = asleep  # type: ignore[method-assign]
    with running(prefill, decode) as url:
        status, headers, body = ask(url)
    assert (status, int(headers["Retry-After"]) >= 1) == (503, True)
    assert "the engine is asleep" in body["error"]["message"]
    assert prefill.bodies == []


def test_a_decode_engine_whose_room_cannot_be_read_is_503_and_no_prefill_work_is_spent():
    async def nested(request: web.Request) -> web.Response:
        return web.Response(text='{"free": 3, "more": ' + "[" * 200_000, content_type="application/json")

    prefill, decode = prefill_engine(), decode_engine(3)
    decode.tell_room = nested  # type: ignore[method-assign]
    with running(prefill, decode) as url:
        status, _, body = ask(url)
    assert (status, prefill.bodies) == (503, [])
    assert "says of its room what cannot be read" in body["error"]["message"]


def test_decodes_own_refusal_reaches_the_client_with_its_time_to_come_back():
    async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response:
        error = {"message": "decode has no room", "type": "no_room", "code": 503}
        return web.json_response({"error": error}, status=503, headers={"Retry-After": "9"})

    with running(prefill_engine(), FakeEngine(refuse)) as url:
        status, headers, body = ask(url)
    assert (status, headers["Retry-After"]) == (503, "9")
    assert "decode has no room" in body["error"]["message"]


def leave(url: str, when: threading.Event, headers: dict[str, str] | None = None) -> None:
    """A client that closes its connection as soon as `when` has come."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
    connection.request("POST", "/v1/completions", b'{"prompt": "a"}', headers or {})
    assert when.wait(DEADLINE_S)
    connection.close()


def test_a_client_that_leaves_the_queue_is_never_prefilled():
    prefill, decode = prefill_engine(), decode_engine(0)
    with running(prefill, decode) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
        connection.request("POST", "/v1/completions", b'{"prompt": "a"}')
        wait_until(lambda: queued(url) == 1)
        connection.close()
        wait_until(lambda: queued(url) == 0)
        decode.free = 1
        assert ask(url)[0] == 200
    assert len(prefill.bodies) == 1


def test_a_client_that_leaves_while_prefill_computes_has_the_request_given_up_by_its_id():
    async def until_given_up(request: web.Request, body: dict[str, Any]) -> web.Response:
        await prefill.given_up.wait()
        return web.json_response(None)  # as vLLM answers a request that was aborted

    prefill, decode = FakeEngine(until_given_up, abortable=True), decode_engine(2)
    with running(prefill, decode) as url:
        leave(url, prefill.started, {"X-Request-Id": "mine"})
        wait_until(lambda: prefill.aborted == ["mine"])
        wait_until(lambda: get(f"{url}/pdkv/status")["under_way"] == 0)
    assert decode.released == decode.bodies == []


def test_blocks_of_a_prompt_that_was_finished_when_its_client_left_are_freed_through_decode():
    async def finished_all_the_same(request: web.Request, body: dict[str, Any]) -> web.Response:
        await prefill.given_up.wait()
        return web.json_response({"kv_transfer_params": HANDED_OVER})

    prefill, decode = FakeEngine(finished_all_the_same, abortable=True), decode_engine(2)
    with running(prefill, decode) as url:
        leave(url, prefill.started)
        assert decode.was_released.wait(DEADLINE_S)
    assert decode.released == [HANDED_OVER]
    assert decode.bodies == []


def test_a_client_that_leaves_before_decode_answers_has_its_blocks_freed_whether_decode_got_the_request_or_not():
    decode = FakeEngine(hang, free=2)
    with running(prefill_engine(), decode) as url:
        leave(url, decode.started)
        assert decode.was_released.wait(DEADLINE_S)
    assert decode.released == [HANDED_OVER]


def test_blocks_are_freed_through_another_decode_engine_where_the_first_has_died():
    async def die(request: web.Request, body: dict[str, Any]) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    dying, other = FakeEngine(die, free=5), decode_engine(1)

    async def gone(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    dying.release = gone  # type: ignore[method-assign]
    with running(prefill_engine(), dying, other) as url:
        assert ask(url)[0] == 502
        assert other.was_released.wait(DEADLINE_S)
    assert other.released == [HANDED_OVER]


def test_a_thousand_requests_at_no_room_all_get_an_answer_in_time():
    prefill = prefill_engine()
    with running(prefill, decode_engine(0), max_queued=8, max_requests=20, queue_timeout_s=0.3) as url:

        async def burst() -> list[tuple[int, bool]]:
            import aiohttp

            async def one(session: aiohttp.ClientSession) -> tuple[int, bool]:
                async with session.post(f"{url}/v1/completions", data=json.dumps({"prompt": "a"})) as response:
                    await response.read()
                    return response.status, int(response.headers["Retry-After"]) > 0

            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=100)) as session:
                return await asyncio.gather(*(one(session) for _ in range(1000)))

        answers = asyncio.run(burst())
        assert {status for status, _ in answers} == {429, 503}
        assert all(has_time for _, has_time in answers)
        assert get(f"{url}/pdkv/status")["under_way"] == 0
    assert prefill.bodies == []
