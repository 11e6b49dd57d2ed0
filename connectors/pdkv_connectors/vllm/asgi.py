"""What pdkv's middlewares in vLLM's API server share. vLLM loads a middleware by ``--middleware module.Class``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope

Handler = Callable[["Request"], Awaitable[JSONResponse]]

#: What paths begin with where vLLM takes requests that may carry transfer parameters.
_GENERATES = (
    "/v1/completions",
    "/v1/chat/",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
    "/cohere/",
    "/v2/chat",
    "/invocations",
)


def is_generation(scope: Scope) -> bool:
    """Whether this is a request for tokens."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")).startswith(_GENERATES)


class Routes:
    """Endpoints of a middleware, added to the application when the first event comes through.

    They stand behind all middlewares, so that vLLM's authentication guards what begins with ``/v1``, as it guards its
    own endpoints; a middleware that answered by itself would stand before it.
    """

    def __init__(self, *routes: tuple[str, str, Handler]) -> None:
        self._routes = [Route(path, handler, methods=[method]) for method, path, handler in routes]
        self._added = False

    def add_to(self, scope: Scope) -> None:
        """Add them once; every event of a server names its application, the first being ``lifespan``."""
        if not self._added and "app" in scope:
            scope["app"].router.routes.extend(self._routes)
            self._added = True


async def read_body(receive: Receive, max_nbytes: int) -> bytes | None:
    """The whole body; None where the client left. ValueError where it is larger than `max_nbytes`."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > max_nbytes:
            raise ValueError(f"the body is larger than {max_nbytes} bytes.")
        if not message.get("more_body", False):
            return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body which was read already, then whatever comes next."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def error_response(status: int, message: str, kind: str, retry_after_s: int | None = None, **more: Any) -> JSONResponse:
    """An error in OpenAI's format."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    error = {"message": message, "type": kind, "param": None, "code": status, **more}
    return JSONResponse({"error": error}, status, headers)


def header(scope: Scope, name: str) -> str | None:
    return Headers(scope=scope).get(name)
