"""What engines answer, as the client gets it: errors in one form, and streams passed on byte by byte."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pdkv.proxy.errors import ApiError, HandoverRefused, bad_request, engine_error
from pdkv.proxy.upstream import Engine
from pdkv_connectors.vllm.refusals import KIND, is_refusal

logger = logging.getLogger("pdkv.proxy")

_SHOWN_NCHARS = 500
_SLOW_CLIENT_GRACE_S = 30.0
#: Statuses of `pdkv_connectors.vllm.refusals`: used before; too late, or of what is gone. With the others, which are of
#: parameters that are none or were altered, a second prefill would fare no better.
_MENDED_BY_PREFILL = (409, 410)


class EventStream(StreamingResponse):
    """Server-sent events of an engine, passed on byte by byte.

    `held` is closed when the response ends, however it ends, and the connection to the engine with it: when the client
    leaves, the stream is cancelled and the engine stops generating. `timeout_s` is what the engine was given for all
    of it.
    """

    def __init__(
        self, engine: Engine, upstream: aiohttp.ClientResponse, held: AsyncExitStack, timeout_s: float
    ) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self._upstream = upstream
        self.held = held
        super().__init__(self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The engine has its own deadline; this one is for a client that stays connected and does not read.
        try:
            async with self.held, asyncio.timeout(self._timeout_s + _SLOW_CLIENT_GRACE_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            logger.warning("stream given up: the client did not read it in time")

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            with self._engine.failures(self._timeout_s):
                async for chunk in self._upstream.content.iter_any():
                    yield chunk
        except ApiError as error:
            # The status is sent already. No [DONE] follows, so that a cut answer never looks complete.
            logger.warning("stream broke off: %s", error)
            yield b"data: " + msgspec.json.encode(error.body) + b"\n\n"


def read_json(content: bytes, kind: Any = Any) -> Any:
    """What an engine answered, as `kind`; msgspec.DecodeError where it is no JSON, or nested too deeply to be read."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from error


def raise_for_status(engine: Engine, response: aiohttp.ClientResponse, content: bytes) -> None:
    """Pass a client's error on as the engine worded it; turn an engine's, or a redirection, into 502 that names it.

    That decode refuses what prefill said of the KV is no client's error: it was this proxy that handed it over. What
    becomes of such a request its caller decides (HandoverRefused).

    An engine that takes no requests now (503, with or without a time to come back) is 503 here too.
    """
    status = response.status
    if status < 300:
        return
    retry_after_s = _retry_after_s(response)
    try:
        body = read_json(content)
        message = str(body["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        body, message = None, content[:_SHOWN_NCHARS].decode(errors="replace")
    said = f"the {engine.role} engine answered {status}: {message[:_SHOWN_NCHARS]}"
    if 400 <= status < 500 and _refuses_the_handover(body):
        raise HandoverRefused(said, _failure(body), is_mended_by_prefill=status in _MENDED_BY_PREFILL)
    if 400 <= status < 500:
        error = bad_request(message, status=status)
        error.retry_after_s = retry_after_s
        if body is not None:
            error.body = body
        raise error
    if status == 503:
        raise engine_error(503, said, retry_after_s or 1)
    raise engine_error(502, said)


def _refuses_the_handover(body: Any) -> bool:
    return isinstance(body, dict) and body["error"].get("type") == KIND


def _failure(body: Any) -> str:
    """Decode's word for a refusal; "unknown" where this proxy knows no such: engines name no counters here."""
    failure = body["error"].get("failure")
    return failure if isinstance(failure, str) and is_refusal(failure) else "unknown"


def _retry_after_s(response: aiohttp.ClientResponse) -> int | None:
    """Seconds in the Retry-After header; None where there is none, or a date."""
    text = response.headers.get("Retry-After", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else None
