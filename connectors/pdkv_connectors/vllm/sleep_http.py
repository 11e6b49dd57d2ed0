"""Sleep over HTTP: ``--middleware pdkv_connectors.vllm.sleep_http.SleepAnswers`` in vLLM's API server.

vLLM has the endpoints ``/sleep``, ``/wake_up``, ``/release_kv_cache_memory`` and ``/is_sleeping`` (with
``VLLM_SERVER_DEV_MODE=1``). Stock, a refusal is a bare 500, and a request that comes while the engine is asleep waits
until somebody wakes it. Here:

=====================================  ===============================================================================
sleep while requests hold blocks       409 at once, with the ids of the holders
the same with ``mode=wait``            waits for them too; 409 after ``PDKV_SLEEP_TIMEOUT``
the same with ``mode=abort`` given     ends them: peers are told, and their word is waited for, as long as that
another refusal to sleep               409, with the reason
wake without enough memory             503, with how many bytes are missing; the engine stays asleep
a request for tokens while asleep      503 with Retry-After, also between waking the weights and waking the cache
``/pdkv/room`` while asleep            the same: a proxy then sends no request here, and spends no prefill work
=====================================  ===============================================================================

Whether the engine sleeps is asked of the engine, but only once a call that may put it to sleep has come through this
API server; with several API servers of one engine, send those calls to each.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.responses import JSONResponse

from pdkv_connectors.vllm.asgi import error_response
from pdkv_connectors.vllm.held import ABORT_TRANSFERS, holders_in, reason_in

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(f"vllm.{__name__}")

SLEEP_PATH = "/sleep"
SLEEP_PATHS = frozenset((SLEEP_PATH, "/release_kv_cache_memory"))
WAKE_PATH = "/wake_up"
#: What runs the model. Other paths are answered while the engine sleeps.
_GENERATES = (
    "/v1/completions",
    "/v1/chat/",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/inference/",
    "/pooling",
    "/v1/pdkv/",
)
#: Asked by whoever routes requests: an engine that is asleep has none.
_ROOM_PATH = "/pdkv/room"
RETRY_AFTER_S = 5
#: By which a refusal of `sleep_engine.py` without holders is known from an engine that broke.
_REFUSALS = (
    "was not started to sleep",
    "is a fixed one",
    "waits already to sleep",
    "sleep was given up",
    "hold blocks",
)


class SleepAnswers:
    """The middleware. vLLM makes it, with nothing but the application behind it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._may_sleep = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if scope["type"] != "http" or (scope["method"] != "POST" and path != _ROOM_PATH):
            await self._app(scope, receive, send)
        elif path in SLEEP_PATHS or path == WAKE_PATH:
            if b"level=0" not in scope.get("query_string", b""):
                self._may_sleep = True
            await self._call(path, scope, receive, send)
        elif self._may_sleep and path.startswith((*_GENERATES, _ROOM_PATH)) and await self._is_asleep(scope):
            message = "the engine is asleep; send the request again when it has been woken."
            await error_response(503, message, "asleep", RETRY_AFTER_S)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _is_asleep(self, scope: Scope) -> bool:
        self._may_sleep = bool(await scope["app"].state.engine_client.is_sleeping())
        return self._may_sleep

    async def _call(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's own endpoint, with its failures told apart."""
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            if (level := _level_of_abort(path, scope)) is None:
                await self._app(scope, receive, sending)
            else:
                await scope["app"].state.engine_client.sleep(level, ABORT_TRANSFERS)
                await JSONResponse({"status": "sleeping", "level": level})(scope, receive, sending)
        except Exception as error:
            answer = answer_for(path, str(error))
            if begun or answer is None:
                raise
            logger.warning("pdkv: %s refused: %s", path, error)
            await answer(scope, receive, send)


def _level_of_abort(path: str, scope: Scope) -> int | None:
    """The level of a sleep whose caller has written ``mode=abort``, vLLM's default, and so means leases too.

    None for all other calls, and where vLLM does not offer the endpoint: it is not for us to open it.
    """
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    level = query.get("level", ["1"])[-1]
    aborts = path == SLEEP_PATH and query.get("mode", [""])[-1] == "abort" and level in ("1", "2")
    offered = aborts and any(getattr(route, "path", None) == SLEEP_PATH for route in scope["app"].routes)
    return int(level) if offered else None


def answer_for(path: str, text: str) -> JSONResponse | None:
    """The answer to a call that failed with this text; None where it was not refused but broke."""
    if (found := holders_in(text)) is not None:
        reason, holders = found
        return error_response(409, reason, "leases_held", holders=holders)
    if path == WAKE_PATH:
        return error_response(503, reason_in(text), "no_memory", RETRY_AFTER_S) if "bytes are missing" in text else None
    return error_response(409, reason_in(text), "refused") if any(part in text for part in _REFUSALS) else None
