"""The middleware for sleep over HTTP, around a small application that stands for vLLM's API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from pdkv_connectors.vllm.held import holders_in, with_holders
from pdkv_connectors.vllm.sleep_http import SleepAnswers, answer_for

pytestmark = pytest.mark.cpu


class Engine:
    """What the API server asks of the engine, with failures on order."""

    def __init__(self) -> None:
        self.asleep = False
        self.asked = 0
        self.fails: Exception | None = None
        self.slept: list[tuple[int, str]] = []

    async def sleep(self, level: int, mode: str) -> None:
        if self.fails is not None:
            raise self.fails
        self.slept.append((level, mode))

    async def is_sleeping(self) -> bool:
        self.asked += 1
        return self.asleep


@pytest.fixture
def engine() -> Engine:
    return Engine()


@dataclass
class Answer:
    status_code: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class TestClient:
    """Calls an application without a server; what it raises is answered 500, as a server does."""

    __test__ = False

    def __init__(self, app: Any) -> None:
        self.app = app

    def post(self, path: str) -> Answer:
        return asyncio.run(self._call("POST", path))

    def get(self, path: str) -> Answer:
        return asyncio.run(self._call("GET", path))

    async def _call(self, method: str, path: str) -> Answer:
        path, _, query = path.partition("?")
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": []}
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        try:
            await self.app(scope, receive, send)
        except Exception:
            if not sent:
                return Answer(500, {}, b"")
        headers = {name.decode().title(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], headers, b"".join(part.get("body", b"") for part in sent[1:]))


@pytest.fixture
def client(engine: Engine) -> TestClient:
    def endpoint(asleep: bool | None) -> Callable[[Request], Any]:
        async def answer(request: Request) -> JSONResponse:
            if engine.fails is not None:
                raise engine.fails
            if asleep is not None and request.query_params.get("tags") != "weights":
                engine.asleep = asleep
            return JSONResponse({"ok": True})

        return answer

    routes = [
        Route("/sleep", endpoint(True), methods=["POST"]),
        Route("/wake_up", endpoint(False), methods=["POST"]),
        Route("/release_kv_cache_memory", endpoint(True), methods=["POST"]),
        Route("/v1/completions", endpoint(None), methods=["POST"]),
        Route("/health", endpoint(None)),
        Route("/pdkv/room", endpoint(None)),
        Route("/v1/pdkv/release", endpoint(None), methods=["POST"]),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(SleepAnswers)])
    app.state.engine_client = engine
    return TestClient(app)


def test_held_blocks_are_answered_409_with_the_holders(client: TestClient, engine: Engine) -> None:
    engine.fails = Exception("Call to sleep method failed: " + with_holders("2 requests hold blocks.", ["a", "b"]))
    answer = client.post("/sleep")
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert (error["holders"], error["type"], error["message"]) == (["a", "b"], "leases_held", "2 requests hold blocks.")


@pytest.mark.parametrize("path", ["/sleep", "/release_kv_cache_memory"])
def test_another_refusal_is_answered_409_with_its_reason(client: TestClient, engine: Engine, path: str) -> None:
    engine.fails = Exception("Call to sleep method failed: the engine waits already to sleep or to pause; wait.")
    answer = client.post(path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "refused")


def test_waking_without_memory_is_answered_503_with_what_is_missing(client: TestClient, engine: Engine) -> None:
    engine.fails = Exception("Call to wake_up method failed: 4096 bytes are missing; the cache stays asleep.")
    answer = client.post("/wake_up")
    assert answer.status_code == 503
    assert "4096 bytes are missing" in answer.json()["error"]["message"]
    assert "Retry-After" in answer.headers


def test_an_engine_that_broke_is_not_made_to_look_like_a_refusal(client: TestClient, engine: Engine) -> None:
    engine.fails = Exception("EngineCore encountered an issue.")
    assert client.post("/sleep").status_code == 500
    assert answer_for("/wake_up", "EngineCore encountered an issue.") is None


def test_requests_while_asleep_get_503_until_all_is_awake(client: TestClient, engine: Engine) -> None:
    assert client.post("/v1/completions").status_code == 200
    assert client.post("/sleep").status_code == 200
    assert client.post("/v1/completions").status_code == 503
    client.post("/wake_up?tags=weights")
    between = client.post("/v1/completions")
    assert (between.status_code, between.headers["Retry-After"]) == (503, "5")
    client.post("/wake_up?tags=kv_cache")
    assert client.post("/v1/completions").status_code == 200


def test_an_engine_that_is_asleep_has_no_room_and_frees_nothing_for_others(client: TestClient) -> None:
    assert client.get("/pdkv/room").status_code == 200
    client.post("/sleep")
    assert client.get("/pdkv/room").status_code == client.post("/v1/pdkv/release").status_code == 503
    client.post("/wake_up")
    assert client.get("/pdkv/room").status_code == 200


def test_other_paths_are_answered_while_asleep(client: TestClient) -> None:
    client.post("/sleep")
    assert client.get("/health").status_code == 200


def test_an_engine_that_was_never_put_to_sleep_is_not_asked_at_each_request(client: TestClient, engine: Engine) -> None:
    for _ in range(3):
        client.post("/v1/completions")
    assert engine.asked == 0
    client.post("/sleep")
    client.post("/wake_up")
    for _ in range(3):
        client.post("/v1/completions")
    assert engine.asked == 1


def test_pausing_at_level_0_lets_requests_wait_as_vllm_does(client: TestClient, engine: Engine) -> None:
    client.post("/sleep?level=0")
    assert client.post("/v1/completions").status_code == 200
    assert engine.asked == 0


def test_holders_survive_what_is_put_around_the_text() -> None:
    text = "Exception: Call to sleep method failed: " + with_holders("held.", ['a "quoted" id', "b]"]) + "\nTraceback"
    assert holders_in(text) == ("held.", ['a "quoted" id', "b]"])
    assert holders_in("something else") is None


@pytest.mark.parametrize(
    ("query", "slept"),
    [("?mode=abort", [(1, "abort_transfers")]), ("?level=2&mode=abort", [(2, "abort_transfers")])],
)
def test_mode_abort_ends_leases_too_where_the_caller_has_written_it(
    client: TestClient, engine: Engine, query: str, slept: list[tuple[int, str]]
) -> None:
    answer = client.post("/sleep" + query)
    assert (answer.status_code, answer.json()["status"]) == (200, "sleeping")
    assert engine.slept == slept


@pytest.mark.parametrize(
    "query", ["", "?level=2", "?mode=wait", "?mode=keep", "?level=0&mode=abort", "?level=9&mode=abort"]
)
def test_every_other_sleep_is_vllms_own(client: TestClient, engine: Engine, query: str) -> None:
    assert client.post("/sleep" + query).json() == {"ok": True}
    assert engine.slept == []


def test_leases_that_could_not_be_ended_in_time_answer_409_with_the_holders(client: TestClient, engine: Engine) -> None:
    engine.fails = RuntimeError(with_holders("the engine could not sleep within 3 s.", ["a", "b"]))
    answer = client.post("/sleep?mode=abort")
    assert (answer.status_code, answer.json()["error"]["holders"]) == (409, ["a", "b"])


def test_mode_abort_opens_no_endpoint_that_vllm_does_not_offer(engine: Engine) -> None:
    app = Starlette(routes=[], middleware=[Middleware(SleepAnswers)])
    app.state.engine_client = engine
    assert TestClient(app).post("/sleep?mode=abort").status_code == 404
    assert engine.slept == []
