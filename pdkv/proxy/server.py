"""The HTTP server under the proxy: uvicorn, and a deadline for headers, which uvicorn does not have.

Without one a client that sends half a header holds its connection for ever, and some thousand of them all descriptors.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdkv.proxy.errors import bad_request
from pdkv.proxy.settings import ProxySettings

logger = logging.getLogger("pdkv.proxy")

# Streams that still run when the proxy is told to end; their clients see the connection close.
_SHUTDOWN_GRACE_S = 5


class DeadlineProtocol(H11Protocol):
    """A connection that is closed unless a request's header is complete `header_timeout_s` after it began.

    The time of a connection's first header begins when it is made, that of a later one with its first byte: until then
    uvicorn's own limit for idle connections holds.
    """

    header_timeout_s: float

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        is_between_requests = before is None or before.response_complete
        super().data_received(data)
        if self.cycle is not before:  # a header is complete
            self._end()
        elif is_between_requests and self._deadline is None and not self.transport.is_closing():
            self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        message = f"no complete header within {self.header_timeout_s:g} s."
        logger.warning("connection closed: %s", message)
        body = msgspec.json.encode(bad_request(message, status=408).body)
        head = (
            f"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def server(app: Any, settings: ProxySettings) -> uvicorn.Server:
    """A server for `app`, not started."""
    protocol = type("Protocol", (DeadlineProtocol,), {"header_timeout_s": settings.header_timeout_s})
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            log_level="warning",
            timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
            lifespan="on",
        )
    )
