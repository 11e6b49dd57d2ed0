"""A prefill and a decode engine by protocol alone: real HTTP servers on loopback that answer what a test tells them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from pdkv.proxy.app import create_app
from pdkv.proxy.server import server
from pdkv.proxy.settings import ProxySettings
from pdkv.proxy.upstream import Engines

DEADLINE_S = 20.0
HANDED_OVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e1",
    "remote_block_ids": [[3, 4]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "r",
    "tp_size": 1,
}


@dataclass
class FakeEngine:
    """What an engine got, and how it answers. `free` is the room that decode says it has; None is a stock engine.

    `abortable`: a prefill engine that gives up a request by its id.
    """

    answer: Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
    free: int | None = None
    abortable: bool = False
    released: list[dict[str, Any]] = field(default_factory=list)
    was_released: threading.Event = field(default_factory=threading.Event)
    aborted: list[str] = field(default_factory=list)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    rooms_asked: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    dropped: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.started.set()
        try:
            return await self.answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.dropped.set()
            raise

    async def tell_room(self, request: web.Request) -> web.Response:
        self.rooms_asked += 1
        if self.free is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"free": self.free, "free_blocks": 100, "retry_after_s": 0 if self.free else 7})

    async def release(self, request: web.Request) -> web.Response:
        self.released.append((await request.json())["kv_transfer_params"])
        self.was_released.set()
        return web.json_response({"released": True})

    async def abort(self, request: web.Request) -> web.Response:
        if not self.abortable:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.aborted.append((await request.json())["request_id"])
        self.given_up.set()
        return web.json_response({"aborted": 1})


def engine(answer: Any, status: int = 200) -> FakeEngine:
    """An engine with one fixed JSON answer."""

    async def fixed(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response(answer, status=status)

    return FakeEngine(fixed)


def prefill_engine() -> FakeEngine:
    return engine({"choices": [{"text": "x"}], "kv_transfer_params": HANDED_OVER})


async def hang(request: web.Request, body: dict[str, Any]) -> web.Response:
    await asyncio.sleep(3600)
    return web.Response()


@contextmanager
def running(*engines: FakeEngine, num_prefill: int = 1, **settings: Any) -> Iterator[str]:
    """The base URL of a real proxy in front of prefill, then decode engines, all in one event loop of one thread."""
    started = threading.Event()
    state: dict[str, Any] = {}

    async def serve() -> None:
        runners = [await _start(fake) for fake in engines if not fake.url]
        urls = tuple(fake.url for fake in engines)
        proxy_settings = ProxySettings(prefill_urls=urls[:num_prefill], decode_urls=urls[num_prefill:], **settings)
        proxy = server(create_app(proxy_settings, Engines(proxy_settings)), proxy_settings)
        sock = socket.create_server(("127.0.0.1", 0))
        state.update(server=proxy, url=f"http://127.0.0.1:{sock.getsockname()[1]}")
        started.set()
        await proxy.serve(sockets=[sock])
        for runner in runners:
            await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(DEADLINE_S)
    try:
        yield state["url"]
    finally:
        state["server"].should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


async def _start(fake: FakeEngine) -> web.AppRunner:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", fake.handle)
    app.router.add_post("/v1/chat/completions", fake.handle)
    app.router.add_get("/pdkv/room", fake.tell_room)
    app.router.add_post("/v1/pdkv/release", fake.release)
    app.router.add_post("/v1/pdkv/abort", fake.abort)
    # handler_cancellation: a handler is cancelled when its client leaves, as vLLM's server does it
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return runner


def dead_engine() -> FakeEngine:
    """An engine at an address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return FakeEngine(hang, url=f"http://127.0.0.1:{sock.getsockname()[1]}")


def post(url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    """Status, headers and JSON answer of a POST; `body` is sent as JSON, or as it is where it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, response.headers, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


def get(url: str) -> Any:
    """The JSON answer of a GET."""
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
        return json.loads(response.read())


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask until it is so; AssertionError where it does not become so in time."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it has not become so in time"
        time.sleep(0.01)
