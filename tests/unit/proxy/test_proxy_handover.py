"""What the proxy does where decode refuses the KV that the proxy itself had handed over."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from fake_pd_engines import (
    DEADLINE_S,
    HANDED_OVER,
    FakeEngine,
    engine,
    get,
    hang,
    post,
    prefill_engine,
    running,
    wait_until,
)

from pdkv.proxy import app

pytestmark = pytest.mark.cpu

ANSWER = {"id": "cmpl-1", "choices": [{"text": " Paris"}]}
#: As `pdkv_connectors.vllm.refusals` has them, by kinds: what a second prefill mends, and what it does not.
MENDED = [("expired", 410), ("lease_lost", 410), ("wrong_engine", 410), ("stale_generation", 410), ("replayed", 409)]
NOT_MENDED = [("malformed", 400), ("forged", 400), ("bad_blocks", 400)]


def refusal(failure: str, status: int) -> web.Response:
    message = f"the KV that kv_transfer_params refer to cannot be had ({failure}: so it is); have prefill compute it."
    error = {"message": message, "type": "kv_reference_refused", "code": status, "failure": failure}
    return web.json_response({"error": error}, status=status)


def decode_that_refuses(times: int, failure: str = "expired", status: int = 410) -> FakeEngine:
    """The first so many requests; it answers the others, as a stream where it is asked for one."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(decode.bodies) <= times:
            return refusal(failure, status)
        if not body.get("stream"):
            return web.json_response(ANSWER)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\ndata: [DONE]\n\n")
        return response

    decode = FakeEngine(answer, free=8)
    return decode


def prefill_numbered() -> FakeEngine:
    """Hands over something else each time."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        params = {**HANDED_OVER, "remote_request_id": f"r{len(prefill.bodies)}"}
        return web.json_response({"kv_transfer_params": params})

    prefill = FakeEngine(answer)
    return prefill


def ask(url: str, **more: Any) -> tuple[int, Any, Any]:
    return post(f"{url}/v1/completions", {"prompt": "a", **more})


def handed_over(decode: FakeEngine) -> list[str]:
    return [body["kv_transfer_params"]["remote_request_id"] for body in decode.bodies]


@pytest.mark.parametrize(("failure", "status"), MENDED)
def test_kv_that_came_too_late_or_is_of_what_is_gone_is_prefilled_once_more_and_counted(failure, status):
    prefill, decode = prefill_numbered(), decode_that_refuses(1, failure, status)
    with running(prefill, decode) as url:
        answer = ask(url)
        counts = get(f"{url}/pdkv/status")["counts"]
        assert get(f"{url}/pdkv/status")["under_way"] == 0
    assert (answer[0], answer[2]) == (200, ANSWER)
    assert handed_over(decode) == ["r1", "r2"]
    assert counts == {"refused_handovers": 1, f"refused_{failure}": 1, "prefilled_again": 1}
    assert len({headers["x-request-id"] for headers in (*prefill.headers, *decode.headers)}) == 1


def test_a_stream_that_has_not_begun_is_prefilled_once_more_as_well():
    prefill, decode = prefill_numbered(), decode_that_refuses(1)
    with running(prefill, decode) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "stream": True}))
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"data: {}\n\ndata: [DONE]\n\n")
        connection.close()
    assert handed_over(decode) == ["r1", "r2"]


def test_what_was_refused_is_released_so_that_no_prefill_holds_it():
    decode = decode_that_refuses(1)
    with running(prefill_numbered(), decode) as url:
        assert ask(url)[0] == 200
        wait_until(lambda: len(decode.released) == 1)
    assert [params["remote_request_id"] for params in decode.released] == ["r1"]


def test_another_prefill_engine_is_asked_where_there_is_one():
    first, other, decode = prefill_numbered(), prefill_numbered(), decode_that_refuses(1)
    with running(first, other, decode, num_prefill=2) as url:
        assert ask(url)[0] == 200
    assert (len(first.bodies), len(other.bodies)) == (1, 1)


def test_kv_that_is_refused_twice_is_503_with_the_reason_and_a_time_to_come_back():
    prefill, decode = prefill_numbered(), decode_that_refuses(9)
    with running(prefill, decode) as url:
        status, headers, body = ask(url)
        counts = get(f"{url}/pdkv/status")["counts"]
    assert (status, headers["Retry-After"], body["error"]["failure"]) == (503, "1", "expired")
    assert "the decode engine answered 410" in body["error"]["message"]
    assert "(expired: so it is)" in body["error"]["message"]
    assert "prefilling again did not help: send the request once more in 1 s." in body["error"]["message"]
    assert len(prefill.bodies) == len(decode.bodies) == 2
    assert counts == {"refused_handovers": 2, "refused_expired": 2, "prefilled_again": 1}


@pytest.mark.parametrize(("failure", "status"), [*NOT_MENDED, ("a word of another version", 400)])
def test_kv_that_another_prefill_would_not_mend_is_502_with_the_reason_at_once(failure, status):
    prefill, decode = prefill_numbered(), decode_that_refuses(9, failure, status)
    with running(prefill, decode) as url:
        found, _, body = ask(url)
        counts = get(f"{url}/pdkv/status")["counts"]
    word = failure if (failure, status) in NOT_MENDED else "unknown"
    assert (found, body["error"]["type"], body["error"]["failure"]) == (502, "engine_error", word)
    assert f"({failure}: so it is)" in body["error"]["message"]
    assert len(prefill.bodies) == len(decode.bodies) == 1
    assert counts == {"refused_handovers": 1, f"refused_{word}": 1}


class Clock:
    """The proxy's clock: it stands, and is set forward whenever decode refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(app, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def forward(self, decode: FakeEngine, by_s: float) -> None:
        inner = decode.answer

        async def later(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            self.now_s += by_s
            return await inner(request, body)

        decode.answer = later


def test_nothing_is_prefilled_again_when_the_requests_time_is_over(monkeypatch):
    prefill, decode = prefill_numbered(), decode_that_refuses(9)
    Clock(monkeypatch).forward(decode, by_s=2 * DEADLINE_S)
    with running(prefill, decode, request_timeout_s=DEADLINE_S) as url:
        status, headers, body = ask(url)
    assert (status, headers["Retry-After"], body["error"]["failure"]) == (503, "1", "expired")
    assert "no time is left to prefill again" in body["error"]["message"]
    assert len(prefill.bodies) == len(decode.bodies) == 1


def test_a_second_round_has_only_the_time_that_the_first_has_left(monkeypatch):
    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (first(request, body) if len(prefill.bodies) == 1 else hang(request, body))

    prefill, decode = prefill_numbered(), decode_that_refuses(1)
    first, prefill.answer = prefill.answer, slow
    Clock(monkeypatch).forward(decode, by_s=2 * DEADLINE_S - 1)
    with running(prefill, decode, request_timeout_s=DEADLINE_S) as url:
        began = time.monotonic()
        status, _, body = ask(url)
        took_s = time.monotonic() - began
    assert status == 504
    assert "the prefill engine" in body["error"]["message"]
    assert took_s < DEADLINE_S / 2


def test_a_stream_that_breaks_off_for_want_of_time_says_how_much_its_round_had(monkeypatch):
    async def begin_and_hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(decode.bodies) == 1:
            return refusal("expired", 410)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        return await hang(request, body)

    decode = FakeEngine(begin_and_hang, free=8)
    Clock(monkeypatch).forward(decode, by_s=2 * DEADLINE_S - 2)
    with running(prefill_numbered(), decode, request_timeout_s=DEADLINE_S) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "stream": True}))
        events = connection.getresponse().read()
        connection.close()
    assert b"did not answer within 2 s" in events
    assert b"[DONE]" not in events


def test_a_second_round_waits_for_room_no_longer_than_it_has_time(monkeypatch):
    async def full(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        decode.free = 0
        return refusal("expired", 410)

    decode = FakeEngine(full, free=1)
    Clock(monkeypatch).forward(decode, by_s=2 * DEADLINE_S - 1)
    with running(prefill_numbered(), decode, request_timeout_s=DEADLINE_S, queue_timeout_s=9 * DEADLINE_S) as url:
        status, headers, body = ask(url)
    assert (status, headers["Retry-After"], body["error"]["type"]) == (503, "7", "no_room")
    assert len(decode.bodies) == 1


def test_other_answers_of_decode_are_not_asked_for_again():
    said = {"error": {"message": "gone", "type": "NotFoundError", "param": None, "code": 410}}
    prefill, decode = prefill_engine(), engine(said, status=410)
    with running(prefill, decode) as url:
        status, _, body = ask(url)
    assert (status, body) == (410, said)
    assert len(prefill.bodies) == len(decode.bodies) == 1
