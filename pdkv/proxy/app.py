"""The proxy's HTTP interface: OpenAI's completions and chat completions, in front of a prefill and a decode engine."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from pdkv.proxy import request as legs
from pdkv.proxy.errors import ApiError, bad_request, engine_error
from pdkv.proxy.settings import ProxySettings
from pdkv.proxy.upstream import Engine, Engines

logger = logging.getLogger("pdkv.proxy")

T = TypeVar("T")
# The id becomes a header and a part of the engines' request ids and logs.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SHOWN_NCHARS = 500
_SLOW_CLIENT_GRACE_S = 30.0


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


def create_app(settings: ProxySettings, engines: Engines) -> FastAPI:
    """The application. It closes `engines` when it shuts down."""
    proxy = Proxy(settings, engines)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await engines.close()

    app = FastAPI(title="pdkv proxy", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return await proxy.models(request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await proxy.generate(request, "/v1/completions")

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await proxy.generate(request, "/v1/chat/completions")

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        body = bad_request(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code).body
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nginx's "client closed request"; nobody reads it

    return app


class Proxy:
    """Carries requests through prefill, then decode."""

    def __init__(self, settings: ProxySettings, engines: Engines) -> None:
        self._settings = settings
        self.engines = engines

    async def models(self, request: Request) -> Response:
        """The decode engine's list of models."""
        async with self.engines.decode.request("GET", "/v1/models", forwarded_headers(request)) as response:
            return Response(await response.read(), response.status, media_type=response.content_type)

    async def generate(self, request: Request, path: str) -> Response:
        """One completion or chat completion, streamed where the client asks for it."""
        headers = {**forwarded_headers(request), "X-Request-Id": request_id(request)}
        body = legs.parse(await read_body(request, self._settings))
        legs.check(body)
        began = time.monotonic()
        params = await unless_client_leaves(request, self._prefill(path, headers, body))
        prefilled = time.monotonic()
        logger.info("%s prefill %.0f ms", headers["X-Request-Id"], 1e3 * (prefilled - began))
        response = await unless_client_leaves(request, self._decode(path, headers, legs.decode_request(body, params)))
        logger.info("%s decode answers after %.0f ms", headers["X-Request-Id"], 1e3 * (time.monotonic() - prefilled))
        response.headers["X-Request-Id"] = headers["X-Request-Id"]
        return response

    async def _prefill(self, path: str, headers: dict[str, str], body: legs.Json) -> legs.Json:
        leg = legs.prefill_request(body, chat="chat" in path)
        async with self.engines.prefill.request("POST", path, headers, leg) as response:
            content = await response.read()
            raise_for_status(self.engines.prefill, response.status, content)
            try:
                answer = msgspec.json.decode(content)
            except msgspec.DecodeError as error:
                raise engine_error(502, f"the prefill engine's answer is not valid JSON: {error}") from error
        return legs.transfer_params(answer)

    async def _decode(self, path: str, headers: dict[str, str], body: legs.Json) -> Response:
        async with AsyncExitStack() as stack:
            response = await stack.enter_async_context(self.engines.decode.request("POST", path, headers, body))
            if response.status != 200 or response.content_type != "text/event-stream":
                content = await response.read()
                raise_for_status(self.engines.decode, response.status, content)
                return Response(content, response.status, media_type=response.content_type)
            return EventStream(self.engines.decode, response, stack.pop_all())


class EventStream(StreamingResponse):
    """Server-sent events of an engine, passed on byte by byte.

    `held` is closed when the response ends, however it ends, and the connection to the engine with it: when the client
    leaves, the stream is cancelled and the engine stops generating.
    """

    def __init__(self, engine: Engine, upstream: aiohttp.ClientResponse, held: AsyncExitStack) -> None:
        self._engine = engine
        self._upstream = upstream
        self._held = held
        super().__init__(self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The engine has its own deadline; this one is for a client that stays connected and does not read.
        try:
            async with self._held, asyncio.timeout(self._engine.timeout_s + _SLOW_CLIENT_GRACE_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            logger.warning("stream given up: the client did not read it in time")

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            with self._engine.failures():
                async for chunk in self._upstream.content.iter_any():
                    yield chunk
        except ApiError as error:
            # The status is sent already. No [DONE] follows, so that a cut answer never looks complete.
            logger.warning("stream broke off: %s", error)
            yield b"data: " + msgspec.json.encode(error.body) + b"\n\n"


def raise_for_status(engine: Engine, status: int, content: bytes) -> None:
    """Pass a client's error on as the engine worded it; turn an engine's error into 502 that names the engine."""
    if status < 400:
        return
    try:
        body = msgspec.json.decode(content)
        message = str(body["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        body, message = None, content[:_SHOWN_NCHARS].decode(errors="replace")
    if status < 500:
        error = bad_request(message, status=status)
        if body is not None:
            error.body = body
        raise error
    raise engine_error(502, f"the {engine.role} engine answered {status}: {message[:_SHOWN_NCHARS]}")


def forwarded_headers(request: Request) -> dict[str, str]:
    """The headers that engines get from the client: its credentials, for engines that run with an API key."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if "authorization" in request.headers:
        headers["Authorization"] = request.headers["authorization"]
    return headers


def request_id(request: Request) -> str:
    """The client's X-Request-Id, or a new one. Both engines get the same."""
    given = request.headers.get("x-request-id")
    if given is None:
        return f"pdkv-{uuid.uuid4().hex}"
    if not _REQUEST_ID.fullmatch(given):
        raise bad_request("X-Request-Id must be 1 to 128 letters, digits, or any of . _ : -")
    return given


async def read_body(request: Request, settings: ProxySettings) -> bytes:
    """The request's body.

    Raises:
        ApiError: 413 as soon as it is larger than the limit, 408 where it takes too long to arrive.
        ClientGone: the client left before it was complete.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > settings.max_body_nbytes:
                    raise bad_request(f"the body is larger than {settings.max_body_nbytes} bytes.", status=413)
    except TimeoutError as error:
        raise bad_request(f"the body did not arrive within {settings.body_timeout_s:g} s.", status=408) from error
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; ClientGone, and `work` cancelled, where the client leaves before."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, leaving):
            if not pending.done():
                pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
