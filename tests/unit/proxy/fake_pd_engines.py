"""A prefill and a decode engine by protocol alone: real HTTP servers on loopback that answer what a test tells them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from aiohttp import web

from pdkv.proxy.app import create_app
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
    """What an engine got, and how it answers."""

    answer: Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
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
def running(*engines: FakeEngine, **settings: Any) -> Iterator[str]:
    """The base URL of a real proxy in front of (prefill, decode), all in one event loop of a thread of its own."""
    started = threading.Event()
    state: dict[str, Any] = {}

    async def serve() -> None:
        runners = [await _start(fake) for fake in engines if not fake.url]
        proxy_settings = ProxySettings(prefill_url=engines[0].url, decode_url=engines[1].url, **settings)
        app = create_app(proxy_settings, Engines(proxy_settings))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=1))
        sock = socket.create_server(("127.0.0.1", 0))
        state.update(server=server, url=f"http://127.0.0.1:{sock.getsockname()[1]}")
        started.set()
        await server.serve(sockets=[sock])
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
