"""The proxy as clients meet it: a real server between real HTTP engines that play prefill and decode by protocol."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
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
    hang,
    post,
    prefill_engine,
    running,
)

pytestmark = pytest.mark.cpu

ANSWER = {"id": "cmpl-1", "choices": [{"text": " Paris"}], "kv_transfer_params": None}
EVENTS = [b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"choices":[{"text":"b"}]}\n\n', b"data: [DONE]\n\n"]


def streaming_engine(events: list[bytes], then: Any = None) -> FakeEngine:
    """Sends `events`, then awaits `then(response)`."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        if then is not None:
            await then(request)
        return response

    return FakeEngine(answer)


def open_stream(url: str, path: str = "/v1/completions") -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
    connection.request("POST", path, json.dumps({"prompt": "a", "stream": True}), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_goes_through_prefill_then_decode_under_one_request_id(path):
    prefill, decode = prefill_engine(), engine(ANSWER)
    request = {"messages": [], "prompt": "a", "temperature": 0}
    with running(prefill, decode) as url:
        status, headers, answer = post(url + path, request)
    assert (status, answer) == (200, ANSWER)
    assert prefill.bodies[0]["max_tokens"] == 1
    assert decode.bodies == [{**request, "kv_transfer_params": HANDED_OVER}]
    ids = {prefill.headers[0]["x-request-id"], decode.headers[0]["x-request-id"], headers["X-Request-Id"]}
    assert len(ids) == 1


def test_max_tokens_that_the_client_left_out_stays_out_on_decode():
    decode = engine(ANSWER)
    with running(prefill_engine(), decode) as url:
        post(f"{url}/v1/completions", {"prompt": "a"})
    assert "max_tokens" not in decode.bodies[0]


def test_the_clients_request_id_and_credentials_reach_both_engines():
    prefill, decode = prefill_engine(), engine(ANSWER)
    with running(prefill, decode) as url:
        post(f"{url}/v1/completions", {"prompt": "a"}, {"X-Request-Id": "mine-7", "Authorization": "Bearer k"})
    for got in (prefill.headers[0], decode.headers[0]):
        assert (got["x-request-id"], got["authorization"]) == ("mine-7", "Bearer k")


def test_an_unusable_request_id_is_refused():
    with running(prefill_engine(), engine(ANSWER)) as url:
        status, _, answer = post(f"{url}/v1/completions", {"prompt": "a"}, {"X-Request-Id": "a b"})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_a_stream_is_passed_on_byte_by_byte_while_it_is_generated():
    decode = streaming_engine(EVENTS)
    with running(prefill_engine(), decode) as url:
        connection, response = open_stream(url)
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.read() == b"".join(EVENTS)
        connection.close()
    assert decode.bodies[0]["stream"] is True


def test_the_first_event_arrives_before_the_last_is_generated():
    decode = streaming_engine(EVENTS[:1], then=lambda request: asyncio.sleep(3600))
    with running(prefill_engine(), decode) as url:
        connection, response = open_stream(url)
        assert response.read(len(EVENTS[0])) == EVENTS[0]
        connection.close()


def test_a_client_that_leaves_a_stream_cancels_decode():
    decode = streaming_engine(EVENTS[:1], then=lambda request: asyncio.sleep(3600))
    with running(prefill_engine(), decode) as url:
        connection, response = open_stream(url)
        response.read(len(EVENTS[0]))
        response.close()
        connection.close()
        assert decode.dropped.wait(DEADLINE_S)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_client_that_leaves_before_the_answer_cancels_the_engine(side):
    hanging = FakeEngine(hang)
    engines = (hanging, engine(ANSWER)) if side == "prefill" else (prefill_engine(), hanging)
    with running(*engines) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
        connection.request("POST", "/v1/completions", b'{"prompt": "a"}')
        assert hanging.started.wait(DEADLINE_S)
        connection.close()
        assert hanging.dropped.wait(DEADLINE_S)


def test_a_stream_that_breaks_off_ends_with_an_error_and_no_done():
    first_was_seen = threading.Event()

    async def cut(request: web.Request) -> None:
        await asyncio.to_thread(first_was_seen.wait, DEADLINE_S)
        assert request.transport is not None
        request.transport.abort()

    with running(prefill_engine(), streaming_engine(EVENTS[:1], then=cut)) as url:
        connection, response = open_stream(url)
        assert response.read(len(EVENTS[0])) == EVENTS[0]
        first_was_seen.set()
        rest = response.read()
        connection.close()
    assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == 502


@pytest.mark.parametrize("answer", [{"choices": []}, {"kv_transfer_params": {}}, {"kv_transfer_params": None}])
def test_I13_prefill_without_a_handover_is_502_and_decode_is_not_asked(answer):
    decode = engine(ANSWER)
    with running(engine(answer), decode) as url:
        status, _, body = post(f"{url}/v1/completions", {"prompt": "a"})
    assert (status, body["error"]["code"], decode.bodies) == (502, 502, [])
    assert "kv_transfer_params" in body["error"]["message"]


def test_transfer_parameters_from_the_client_are_400_and_no_engine_is_asked():
    prefill, decode = prefill_engine(), engine(ANSWER)
    with running(prefill, decode) as url:
        status, _, body = post(f"{url}/v1/completions", {"prompt": "a", "kv_transfer_params": HANDED_OVER})
    assert (status, body["error"]["param"]) == (400, "kv_transfer_params")
    assert prefill.bodies == decode.bodies == []


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_that_cannot_be_reached_is_503_and_named(side):
    engines = (dead_engine(), engine(ANSWER)) if side == "prefill" else (prefill_engine(), dead_engine())
    with running(*engines) as url:
        status, _, body = post(f"{url}/v1/completions", {"prompt": "a"})
    assert status == 503
    assert f"the {side} engine at http://127.0.0.1:" in body["error"]["message"]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_that_never_answers_is_504_and_named(side):
    hanging = FakeEngine(hang)
    engines = (hanging, engine(ANSWER)) if side == "prefill" else (prefill_engine(), hanging)
    with running(*engines, request_timeout_s=0.3) as url:
        status, _, body = post(f"{url}/v1/completions", {"prompt": "a"})
    assert status == 504
    assert f"the {side} engine" in body["error"]["message"]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engines_own_failure_is_502_with_its_message(side):
    failing = engine({"error": {"message": "worker died", "type": "x", "code": 500}}, status=500)
    engines = (failing, engine(ANSWER)) if side == "prefill" else (prefill_engine(), failing)
    with running(*engines) as url:
        status, _, body = post(f"{url}/v1/completions", {"prompt": "a"})
    assert status == 502
    assert body["error"]["message"] == f"the {side} engine answered 500: worker died"


def test_a_clients_mistake_is_passed_on_as_the_engine_words_it():
    said = {"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}}
    with running(engine(said, status=404), engine(ANSWER)) as url:
        status, _, body = post(f"{url}/v1/completions", {"prompt": "a"})
    assert (status, body) == (404, said)


def answering(status: int = 200, text: str = "", headers: dict[str, str] | None = None) -> FakeEngine:
    """An engine that says this, whatever it is asked."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=status, text=text, headers=headers, content_type="application/json")

    return FakeEngine(answer)


def test_an_answer_of_prefill_that_is_nested_too_deeply_to_be_read_is_502():
    decode = engine(ANSWER)
    with running(answering(text="[" * 200_000), decode) as url:
        status, _, body = post(f"{url}/v1/completions", {"prompt": "a"})
    assert (status, decode.bodies) == (502, [])
    assert "the prefill engine's answer is not valid JSON" in body["error"]["message"]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_that_sends_the_proxy_elsewhere_is_502_and_nobody_is_asked_there(side):
    other = engine(ANSWER)
    with running(other, engine(ANSWER)):
        lost = answering(307, headers={"Location": f"{other.url}/v1/completions"})
        engines = (lost, engine(ANSWER)) if side == "prefill" else (prefill_engine(), lost)
        with running(*engines) as url:
            status, _, body = post(f"{url}/v1/completions", {"prompt": "a"})
    assert (status, other.bodies) == (502, [])
    assert f"the {side} engine answered 307" in body["error"]["message"]


def test_credentials_that_no_header_may_hold_are_400_and_no_engine_is_asked():
    prefill, decode = prefill_engine(), engine(ANSWER)
    with running(prefill, decode) as url:
        status, _, body = post(f"{url}/v1/completions", {"prompt": "a"}, {"Authorization": "Bearer a\x7fb"})
    assert (status, prefill.bodies, decode.bodies) == (400, [], [])
    assert "Authorization holds a control character" in body["error"]["message"]


def test_invalid_json_is_400_in_openais_format():
    with running(prefill_engine(), engine(ANSWER)) as url:
        status, _, body = post(f"{url}/v1/completions", b"{not json")
    assert status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_a_body_over_the_limit_is_413():
    with running(prefill_engine(), engine(ANSWER), max_body_nbytes=100) as url:
        status, _, body = post(f"{url}/v1/completions", {"prompt": "a" * 200})
    assert (status, body["error"]["code"]) == (413, 413)


def test_a_body_that_does_not_arrive_in_time_is_408():
    with running(prefill_engine(), engine(ANSWER), body_timeout_s=0.2) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b'{"prompt"')
        response = connection.getresponse()
        assert (response.status, json.load(response)["error"]["code"]) == (408, 408)
        connection.close()


def test_health_is_the_proxys_own_and_models_are_decodes():
    with running(prefill_engine(), engine(ANSWER)) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
        connection.request("GET", "/health")
        assert json.load(connection.getresponse()) == {"status": "ok"}
        connection.request("GET", "/v1/models")
        assert json.load(connection.getresponse())["data"] == [{"id": "m"}]
        connection.close()


def test_an_unknown_path_is_404_in_openais_format():
    with running(prefill_engine(), engine(ANSWER)) as url:
        status, _, body = post(f"{url}/v1/embeddings", {})
    assert (status, body["error"]["code"]) == (404, 404)
