"""Errors that clients read, in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: the HTTP status.
        body: what the client gets as JSON.
    """

    def __init__(self, status: int, message: str, *, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def bad_request(message: str, param: str | None = None, status: int = 400) -> ApiError:
    """The client must change the request."""
    return ApiError(status, message, kind="invalid_request_error", param=param)


def engine_error(status: int, message: str) -> ApiError:
    """An engine is to blame: 502 it answered wrongly, 503 it does not answer, 504 it took too long."""
    return ApiError(status, message, kind="engine_error")
