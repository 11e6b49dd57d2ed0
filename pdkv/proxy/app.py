"""The proxy's HTTP interface: OpenAI's completions and chat completions, in front of prefill and decode engines."""

from __future__ import annotations

import asyncio
import logging
import math
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
from pdkv.proxy.errors import ApiError, HandoverRefused, bad_request, engine_error
from pdkv.proxy.handover import Background, PrefillLeg, release
from pdkv.proxy.queue import Queue
from pdkv.proxy.rooms import Place
from pdkv.proxy.settings import ProxySettings
from pdkv.proxy.upstream import Engine, Engines
from pdkv.transfer import Counters

logger = logging.getLogger("pdkv.proxy")

T = TypeVar("T")
#: A leg that begins when its time is over ends by its deadline; 0 would be none.
_SHORTEST_LEG_S = 0.001
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
        self.counters = Counters()

    async def close(self) -> None:
        """Finish what has to be told to engines; each piece has its deadline."""
        await self._background.finish()
        await self._engines.close()

    def status(self) -> dict[str, Any]:
        """What operators look at: requests under way and waiting, each decode engine as last heard of, and counts."""
        decode = [
            {
                "url": room.engine.url,
                "free": None if room.report is None else room.report.free,
                "failure": None if room.failure is None else str(room.failure),
            }
            for room in self._queue.rooms
        ]
        return {
            "under_way": self._queue.under_way,
            "queued": self._queue.waiting,
            "decode": decode,
            "counts": self.counters.as_dict(),
        }

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
            response = await self._serve(request, path, headers, body, held)
            response.headers["X-Request-Id"] = headers["X-Request-Id"]
            if isinstance(response, EventStream):
                response.held.push_async_exit(held.pop_all())
            return response

    async def _serve(
        self, request: Request, path: str, headers: dict[str, str], body: legs.Json, held: AsyncExitStack
    ) -> Response:
        """Both legs; and once again where decode came too late for the KV, of which the client has heard nothing.

        All of it has the time that both legs have: a second round gets what the first has left.
        """
        place = await self._place(request, held, math.inf)
        deadline = time.monotonic() + 2 * self._settings.request_timeout_s
        leg = PrefillLeg(self._engines.prefill, path, headers, body, self._settings.request_timeout_s)
        try:
            return await self._both_legs(request, path, leg, body, place, deadline)
        except HandoverRefused as error:
            refused = error
        if not refused.is_mended_by_prefill:
            raise refused
        logger.warning("%s %s; prefilling again", headers["X-Request-Id"], refused)
        if (left_s := deadline - time.monotonic()) <= 0:
            raise refused.again("no time is left to prefill again")
        place = await self._place(request, held, left_s)
        self.counters.count("prefilled_again")
        timeout_s = _time_for_a_leg(self._settings, deadline)
        leg = PrefillLeg(self._engines.prefill, path, headers, body, timeout_s, last=leg.engine)
        try:
            return await self._both_legs(request, path, leg, body, place, deadline)
        except HandoverRefused as error:
            if not error.is_mended_by_prefill:
                raise
            raise error.again("prefilling again did not help") from error

    async def _place(self, request: Request, held: AsyncExitStack, left_s: float) -> Place:
        timeout_s = min(self._settings.queue_timeout_s, left_s)
        place = await unless_client_leaves(request, self._queue.place(timeout_s))
        held.callback(place.give_up)
        return place

    async def _both_legs(
        self, request: Request, path: str, leg: PrefillLeg, body: legs.Json, place: Place, deadline: float
    ) -> Response:
        name, began = leg.headers["X-Request-Id"], time.monotonic()
        params = await self._prefill(request, leg, place)
        prefilled = time.monotonic()
        logger.info("%s prefill %.0f ms", name, 1e3 * (prefilled - began))
        timeout_s = _time_for_a_leg(self._settings, deadline)
        try:
            response = await self._decode(
                request, path, leg.headers, legs.decode_request(body, params), place, timeout_s
            )
        except HandoverRefused as refused:
            self.counters.count("refused_handovers")
            self.counters.count(f"refused_{refused.failure}")
            raise
        logger.info("%s decode answers after %.0f ms", name, 1e3 * (time.monotonic() - prefilled))
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
        self, request: Request, path: str, headers: dict[str, str], body: legs.Json, place: Place, timeout_s: float
    ) -> Response:
        try:
            return await unless_client_leaves(request, self._decode_leg(path, headers, body, place, timeout_s))
        except (ClientGone, ApiError) as error:
            # Decode itself tells prefill of a request that reached it, and then takes no notice of this.
            if isinstance(error, ClientGone) or error.status >= 500:
                params = body["kv_transfer_params"]
                self._background.start(release(params, headers, self._decode_engines(place)))
            raise

    def _decode_engines(self, place: Place) -> list[Engine]:
        return [place.engine, *(engine for engine in self._engines.decode if engine is not place.engine)]

    async def _decode_leg(
        self, path: str, headers: dict[str, str], body: legs.Json, place: Place, timeout_s: float
    ) -> Response:
        place.sent()
        async with AsyncExitStack() as stack:
            response = await stack.enter_async_context(place.engine.request("POST", path, headers, body, timeout_s))
            if response.status != 200 or response.content_type != "text/event-stream":
                content = await response.read()
                raise_for_status(place.engine, response, content)
                return Response(content, response.status, media_type=response.content_type)
            return EventStream(place.engine, response, stack.pop_all(), timeout_s)


def _time_for_a_leg(settings: ProxySettings, deadline: float) -> float:
    return min(settings.request_timeout_s, max(_SHORTEST_LEG_S, deadline - time.monotonic()))


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
