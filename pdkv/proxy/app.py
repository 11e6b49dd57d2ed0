"""The proxy's HTTP interface: OpenAI's completions and chat completions, in front of prefill and decode engines."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pdkv.proxy import request as legs
from pdkv.proxy.answers import EventStream, raise_for_status
from pdkv.proxy.errors import ApiError, bad_request, engine_error
from pdkv.proxy.handover import Background, PrefillLeg, release
from pdkv.proxy.queue import Queue
from pdkv.proxy.rooms import Place
from pdkv.proxy.settings import ProxySettings
from pdkv.proxy.upstream import Engine, Engines

logger = logging.getLogger("pdkv.proxy")

T = TypeVar("T")
# The id becomes a header and a part of the engines' request ids and logs.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


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
            await proxy.close()

    app = FastAPI(title="pdkv proxy", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}  # of the proxy alone: an engine that is down does not make it unhealthy

    @app.get("/pdkv/status")
    async def status() -> dict[str, Any]:
        return proxy.status()

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
        return JSONResponse(error.body, error.status, error.headers)

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
        self._engines = engines
        self._queue = Queue(settings, engines.decode)
        self._background = Background()

    async def close(self) -> None:
        """Finish what has to be told to engines; each piece has its deadline."""
        await self._background.finish()
        await self._engines.close()

    def status(self) -> dict[str, Any]:
        """What operators look at: requests under way and waiting, and each decode engine as last heard of."""
        decode = [
            {
                "url": room.engine.url,
                "free": None if room.report is None else room.report.free,
                "failure": None if room.failure is None else str(room.failure),
            }
            for room in self._queue.rooms
        ]
        return {"under_way": self._queue.under_way, "queued": self._queue.waiting, "decode": decode}

    async def models(self, request: Request) -> Response:
        """The list of models of the first decode engine that can be reached."""
        failure: ApiError | None = None
        for engine in self._engines.decode:
            try:
                async with engine.request("GET", "/v1/models", forwarded_headers(request)) as response:
                    return Response(await response.read(), response.status, media_type=response.content_type)
            except ApiError as error:
                failure = error
        raise failure or engine_error(503, "there is no decode engine.")

    async def generate(self, request: Request, path: str) -> Response:
        """One completion or chat completion, streamed where the client asks for it."""
        async with AsyncExitStack() as held:
            held.enter_context(self._queue.counted())
            headers = {**forwarded_headers(request), "X-Request-Id": request_id(request)}
            body = legs.parse(await read_body(request, self._settings))
            legs.check(body)
            place = await unless_client_leaves(request, self._queue.place())
            held.callback(place.give_up)
            began = time.monotonic()
            params = await self._prefill(request, PrefillLeg(self._engines.prefill, path, headers, body), place)
            prefilled = time.monotonic()
            logger.info("%s prefill %.0f ms", headers["X-Request-Id"], 1e3 * (prefilled - began))
            response = await self._decode(request, path, headers, legs.decode_request(body, params), place)
            logger.info(
                "%s decode answers after %.0f ms", headers["X-Request-Id"], 1e3 * (time.monotonic() - prefilled)
            )
            response.headers["X-Request-Id"] = headers["X-Request-Id"]
            if isinstance(response, EventStream):
                response.held.push_async_exit(held.pop_all())
            return response

    async def _prefill(self, request: Request, leg: PrefillLeg, place: Place) -> legs.Json:
        running = asyncio.create_task(leg.run())
        try:
            return await unless_client_leaves(request, asyncio.shield(running))
        except ClientGone:
            self._background.start(self._give_up(leg, running, place))
            raise
        except BaseException:
            running.cancel()
            raise

    async def _give_up(self, leg: PrefillLeg, running: asyncio.Task[legs.Json], place: Place) -> None:
        if (params := await leg.give_up(running)) is not None:
            await release(params, leg.headers, self._decode_engines(place))

    async def _decode(
        self, request: Request, path: str, headers: dict[str, str], body: legs.Json, place: Place
    ) -> Response:
        try:
            return await unless_client_leaves(request, self._decode_leg(path, headers, body, place))
        except (ClientGone, ApiError) as error:
            # Decode itself tells prefill of a request that reached it, and then takes no notice of this.
            if isinstance(error, ClientGone) or error.status >= 500:
                params = body["kv_transfer_params"]
                self._background.start(release(params, headers, self._decode_engines(place)))
            raise

    def _decode_engines(self, place: Place) -> list[Engine]:
        return [place.engine, *(engine for engine in self._engines.decode if engine is not place.engine)]

    async def _decode_leg(self, path: str, headers: dict[str, str], body: legs.Json, place: Place) -> Response:
        place.sent()
        async with AsyncExitStack() as stack:
            response = await stack.enter_async_context(place.engine.request("POST", path, headers, body))
            if response.status != 200 or response.content_type != "text/event-stream":
                content = await response.read()
                raise_for_status(place.engine, response, content)
                return Response(content, response.status, media_type=response.content_type)
            return EventStream(place.engine, response, stack.pop_all())


def forwarded_headers(request: Request) -> dict[str, str]:
    """The headers that engines get from the client: its credentials, for engines that run with an API key.

    Raises:
        ApiError: 400 where the credentials hold control characters, which no HTTP client would send on.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if (credentials := request.headers.get("authorization")) is not None:
        if any(c < " " or c == "\x7f" for c in credentials):
            raise bad_request("the header Authorization holds a control character; send the key as it was given out.")
        headers["Authorization"] = credentials
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
