"""Admission on decode: ``--middleware pdkv_connectors.vllm.http.DecodeAdmission`` in vLLM's API server.

A request whose KV is to come from prefill waits on decode until the KV is there. This bounds how many may wait at
once, and how many blocks their prompts may have together. One too many is answered 503 with Retry-After and an error
that names the limit, and prefill is told to free its blocks: who tries again must prefill again. One that is refused by
what it says of its KV is answered 400, 409 or 410 with the reason (`refusals.py`).

=============================  =======================================================================================
``GET /pdkv/room``             how much room there is now, as JSON
``POST /v1/pdkv/release``      ``{"kv_transfer_params": {...}}``: nobody will come for these blocks, prefill frees
                               them; does nothing where the request came here, since the engine then tells prefill
header ``X-Pdkv-Room``         on each answer to a request for tokens: ``requests=3, blocks=120``, what may still come
``PDKV_ADMISSION_REQUESTS``    requests that may wait (default: the engine's ``max_num_seqs``)
``PDKV_ADMISSION_BLOCKS``      blocks of their prompts (default: all blocks of the engine)
=============================  =======================================================================================

**What is counted, and how old it is.** The scheduler runs in another process and says who waits in ``waiting.json`` in
the status folder, once a step (`waiting.py`); it is read at each decision. A request counts from the moment it is let
through here until the file says that it waits no more, or its answer begins, or it ends. So what is known late, by one
step at most, makes the count too high and never too low. Several API servers of one engine see each other's requests
through the file, a step late. Without a status folder a request counts until its answer begins, which for one that is
not streamed is its end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import JSONResponse

from pdkv.transfer import Admission, Counters, Room, SystemClock
from pdkv_connectors.vllm.asgi import Routes, error_response, is_generation, read_body, replay
from pdkv_connectors.vllm.http_refusals import RefusedAnswers
from pdkv_connectors.vllm.settings import EngineSettings
from pdkv_connectors.vllm.waiting import WaitingFile, blocks_of, key_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pdkv_connectors.vllm.refusals import Refusal
    from pdkv_connectors.vllm.waiting import Snapshot

logger = logging.getLogger(f"vllm.{__name__}")

ROOM_HEADER = b"x-pdkv-room"
#: Used where neither a setting nor the scheduler's file says how many sequences run at once.
DEFAULT_REQUESTS = 64
DEFAULT_BLOCK_SIZE = 16
#: For so many requests it is known that they came here, so that prefill has heard or will hear of their ends.
MAX_REMEMBERED = 4096
RELEASE_TIMEOUT_S = 5.0
#: A body must be read whole to be looked into. Prompts are text; media come as links or make the largest bodies.
MAX_BODY_NBYTES = 256 * 2**20


#: Statuses of requests that vLLM may have refused before it looked at the transfer parameters: a field of a wrong type
#: never reaches the code that would tell prefill. Telling it twice does no harm.
_REFUSED_UNREAD = (400, 422)


class _Body(msgspec.Struct):
    """The part of a request that says where its KV is; the rest is not decoded."""

    kv_transfer_params: dict[str, Any] | None = None


def remote_prefill_params(body: bytes) -> dict[str, Any] | None:
    """The transfer parameters of a request whose KV is to come from prefill; None for every other one.

    What cannot be read here is none either: vLLM refuses it in its own words.
    """
    if b"do_remote_prefill" not in body:
        return None
    try:
        params = msgspec.json.decode(body, type=_Body).kv_transfer_params
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        params = _read_as_vllm(body)
    return params if params and params.get("do_remote_prefill") else None


def _read_as_vllm(body: bytes) -> dict[str, Any] | None:
    """By Python's parser, which takes what is no JSON: NaN, for one, which would else lead past admission."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    params = found.get("kv_transfer_params") if isinstance(found, dict) else None
    return params if isinstance(params, dict) else None


class DecodeAdmission:
    """The middleware. vLLM makes it, with nothing but the application behind it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._settings = EngineSettings.from_environment()
        self._file = WaitingFile(self._settings.status_dir)
        self._counters = Counters()
        self._admission: Admission | None = None
        self._waiting: dict[str, str] = {}  # who waits, and the key to look for in the file
        self._came_here: dict[str, None] = {}  # keys of the last requests, oldest first
        self._numbers = itertools.count()
        self._routes = Routes(
            ("GET", "/pdkv/room", self._answer_room), ("POST", "/v1/pdkv/release", self._answer_release)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._routes.add_to(scope)
        if not is_generation(scope):
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(receive, MAX_BODY_NBYTES)
        except ValueError as error:
            await error_response(413, str(error), "invalid_request_error")(scope, receive, send)
            return
        if body is not None:  # else the client has left, and there is nobody to serve
            await self._serve(body, scope, replay(body, receive), send)

    async def _serve(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        params = remote_prefill_params(body)
        if params is None:
            await self._app(scope, receive, self._with_room(send))
            return
        snapshot = self._refresh()
        admission = self._books(snapshot)
        num_blocks = blocks_of(params, snapshot.block_size if snapshot else DEFAULT_BLOCK_SIZE)
        if (limit := admission.limit_hit(num_blocks)) is not None:
            await self._refuse(limit, params, scope, receive, send)
            return
        name, key = str(next(self._numbers)), key_of(params)
        admission.try_enter(name, num_blocks)
        self._remember(key)
        # A reference that is used again has been settled before; the file cannot say when this use of it is.
        self._waiting[name] = "" if snapshot is not None and key in snapshot.settled else key
        statuses: list[int] = []
        answers = RefusedAnswers(lambda: self._refusal(key), scope, receive, self._with_room(send, name, statuses))
        try:
            await self._app(scope, receive, answers)
        finally:
            self._leave(name)
        if answers.replaced:
            self._counters.count("refused_references")
        elif statuses and statuses[0] in _REFUSED_UNREAD:
            await self._release(scope["app"], params)

    def _refusal(self, key: str) -> Refusal | None:
        snapshot = self._file.read()
        return None if snapshot is None else snapshot.refused.get(key)

    def _remember(self, key: str) -> None:
        self._came_here[key] = None
        while len(self._came_here) > MAX_REMEMBERED:
            del self._came_here[next(iter(self._came_here))]

    def _leave(self, name: str) -> None:
        if self._waiting.pop(name, None) is not None:
            self._books(None).leave(name)

    def _books(self, snapshot: Snapshot | None) -> Admission:
        if self._admission is None:
            requests, blocks = self._settings.admission_requests, self._settings.admission_blocks
            if snapshot is None and requests is None:
                logger.warning(
                    "pdkv: neither PDKV_STATUS_DIR nor PDKV_ADMISSION_REQUESTS is set; %d requests may wait for KV.",
                    DEFAULT_REQUESTS,
                )
            self._admission = Admission(
                SystemClock(),
                self._counters,
                requests or (snapshot.max_num_seqs if snapshot else DEFAULT_REQUESTS),
                blocks or (max(1, snapshot.num_blocks - 1) if snapshot else None),
            )
        return self._admission

    def _refresh(self) -> Snapshot | None:
        """Take over what the scheduler says by now."""
        snapshot = self._file.read()
        admission = self._books(snapshot)
        if snapshot is not None:
            for name, key in list(self._waiting.items()):
                if key in snapshot.settled:
                    self._leave(name)
            mine = set(self._waiting.values())
            others = [blocks for key, blocks in snapshot.waiting.items() if key not in mine]
            admission.set_elsewhere(len(others), sum(others))
        return snapshot

    def _with_room(self, send: Send, name: str | None = None, statuses: list[int] | None = None) -> Send:
        """A `send` that adds the room to the answer, notes its status, and lets the request leave when it begins."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                if statuses is not None:
                    statuses.append(message["status"])
                message["headers"] = [*message.get("headers", ()), (ROOM_HEADER, _as_header(self._room()))]
            elif name is not None and message.get("body"):
                self._leave(name)
            await send(message)

        return sending

    async def _refuse(self, limit: str, params: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        self._counters.count("refused_admissions")
        self._remember(key_of(params))
        await self._release(scope["app"], params)
        admission = self._books(None)
        room, retry_after_s = admission.room(), admission.retry_after_s()
        used, most = (
            (room.waiting, room.capacity) if limit == "requests" else (room.waiting_blocks, room.capacity_blocks)
        )
        setting = f"PDKV_ADMISSION_{limit.upper()}"
        response = error_response(
            503,
            f"decode has no room for one more request: {used} of at most {most} {limit} wait for KV from prefill "
            f"({setting}); prefill and send it again in {retry_after_s} s.",
            "no_room",
            retry_after_s,
            limit=limit,
            setting=setting,
            used=used,
            most=most,
        )
        await response(scope, receive, self._with_room(send))

    async def _release(self, app: Any, params: dict[str, Any]) -> bool:
        """Have the connector tell prefill that nobody will come for these blocks; whether it was told to."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await app.state.engine_client.notify_kv_transfer_request_rejected(
                    f"pdkv-release-{uuid.uuid4().hex}", params
                )
        except Exception as error:
            # The answer to the client is the same; prefill's lease then runs out by itself.
            self._counters.count("unreleased")
            logger.error("pdkv: prefill could not be told to free its blocks: %r", error)
            return False
        self._counters.count("released")
        return True

    def _room(self) -> Room:
        return self._books(self._refresh()).room()

    async def _answer_room(self, request: Request) -> JSONResponse:
        room = self._room()
        return JSONResponse(
            {
                "waiting": room.waiting,
                "capacity": room.capacity,
                "free": room.free,
                "waiting_blocks": room.waiting_blocks,
                "capacity_blocks": room.capacity_blocks,
                "free_blocks": room.free_blocks,
                "retry_after_s": room.retry_after_s,
                "counts": self._counters.as_dict(),
                "scheduler_seen": self._file.read() is not None,
            }
        )

    async def _answer_release(self, request: Request) -> JSONResponse:
        try:
            body = await read_body(request.receive, MAX_BODY_NBYTES)
        except ValueError as error:
            return error_response(413, str(error), "invalid_request_error")
        params = remote_prefill_params(body or b"")
        if params is None:
            return error_response(
                400,
                "send kv_transfer_params as prefill answered them, with do_remote_prefill.",
                "invalid_request_error",
            )
        if key_of(params) in self._came_here:
            return JSONResponse({"released": False, "reason": "the request came here; its end is told by the engine"})
        released = await self._release(request.app, params)
        return JSONResponse({"released": released}, 200 if released else 502)


def _as_header(room: Room) -> bytes:
    blocks = "" if room.free_blocks is None else f", blocks={room.free_blocks}"
    return f"requests={room.free}{blocks}".encode()
