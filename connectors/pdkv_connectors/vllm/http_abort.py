"""Giving up a request on prefill: ``--middleware pdkv_connectors.vllm.http_abort.AbortById`` in vLLM's API server.

``POST /v1/pdkv/abort`` with ``{"request_id": ...}`` gives up every request that runs here under that ``X-Request-Id``,
and leaves its connection open. Whoever closed the connection instead would not learn whether the prompt was finished at
that very moment, and then holds blocks under a lease that nobody ends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import JSONResponse

from pdkv_connectors.vllm.asgi import Routes, error_response, header, is_generation, read_body

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MAX_BODY_NBYTES = 4096


class _Abort(msgspec.Struct):
    request_id: str


class AbortById:
    """The middleware. vLLM makes it, with nothing but the application behind it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: dict[str, set[asyncio.Event]] = {}
        self._routes = Routes(("POST", "/v1/pdkv/abort", self._answer_abort))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._routes.add_to(scope)
        request_id = header(scope, "x-request-id") if is_generation(scope) else None
        if request_id is None:
            await self._app(scope, receive, send)
            return
        aborted = asyncio.Event()
        self._running.setdefault(request_id, set()).add(aborted)
        try:
            await self._app(scope, until_aborted(receive, aborted), send)
        finally:
            self._running[request_id].discard(aborted)
            if not self._running[request_id]:
                del self._running[request_id]

    async def _answer_abort(self, request: Request) -> JSONResponse:
        try:
            body = await read_body(request.receive, _MAX_BODY_NBYTES)
            request_id = msgspec.json.decode(body or b"", type=_Abort).request_id
        except (ValueError, msgspec.DecodeError):
            return error_response(400, 'send {"request_id": "..."}.', "invalid_request_error")
        running = self._running.get(request_id, set())
        for aborted in running:
            aborted.set()
        return JSONResponse({"aborted": len(running)})


def until_aborted(receive: Receive, aborted: asyncio.Event) -> Receive:
    """A `receive` that says the client has left once `aborted` is set: vLLM then aborts the request."""

    async def receiving() -> Message:
        message = asyncio.ensure_future(receive())
        abort = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait({message, abort}, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if abort.done() else message.result()
        finally:
            for task in (message, abort):
                task.cancel()

    return receiving
