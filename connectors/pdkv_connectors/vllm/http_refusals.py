"""The answer to a request that was refused by what it said of its KV: a status and a sentence, in place of a bare 500.

vLLM ends such a request with the finish reason "error", and that is all its API server is told: it answers 500 and
"Internal server error", or a stream with that as its only event. The reason is in the scheduler's file (`waiting.py`)
by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdkv_connectors.vllm.asgi import error_response
from pdkv_connectors.vllm.refusals import KIND, Refusal

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

#: How vLLM's streams of server-sent events begin where they begin with an error.
_ERROR_EVENT = b'data: {"error"'


class RefusedAnswers:
    """A `send` that holds the status back until the first byte of the answer shows whether it is an error.

    Args:
        refusal: asked then; None where the request was not refused, and the answer passes as it is.
        send: where the answer goes.
    """

    def __init__(self, refusal: Callable[[], Refusal | None], scope: Scope, receive: Receive, send: Send) -> None:
        self._refusal = refusal
        self._scope, self._receive, self._send = scope, receive, send
        self._start: Message | None = None
        #: Whether the answer was replaced; the rest of vLLM's is dropped then.
        self.replaced = False

    async def __call__(self, message: Message) -> None:
        if self.replaced:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None:
            start, self._start = self._start, None
            if _is_error(start, message) and (refusal := self._refusal()) is not None:
                self.replaced = True
                answer = error_response(refusal.status, refusal.message, KIND, failure=refusal.code)
                await answer(self._scope, self._receive, self._send)
                return
            await self._send(start)
        await self._send(message)


def _is_error(start: Message, first: Message) -> bool:
    return start["status"] == 500 or (start["status"] == 200 and first.get("body", b"").startswith(_ERROR_EVENT))
