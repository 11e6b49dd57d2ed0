"""Errors that clients read, in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

#: Seconds after which it makes sense to look again for an engine that cannot be reached.
DOWN_RETRY_S = 5
#: And after which a prompt may be prefilled in time whose KV came too late for decode.
REFUSED_RETRY_S = 1


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: the HTTP status.
        body: what the client gets as JSON.
        retry_after_s: seconds after which the same request may be sent again; None where that would not help.
        never_arrived: the engine never got the request, so that another may be asked.
    """

    def __init__(
        self, status: int, message: str, *, kind: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.never_arrived = False
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": status}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class HandoverRefused(ApiError):
    """502: decode cannot have the KV that this proxy handed over to it; or 503, where that happened again.

    Attributes:
        failure: decode's word for it (`pdkv_connectors.vllm.refusals`), for instance "expired".
        is_mended_by_prefill: another prefill would make a reference that is good: this one came too late, was used, or
            is of an engine or a memory that is gone.
    """

    def __init__(self, said: str, failure: str, *, is_mended_by_prefill: bool) -> None:
        super().__init__(502, said, kind="engine_error")
        self.failure = failure
        self.is_mended_by_prefill = is_mended_by_prefill
        self.body["error"]["failure"] = failure

    def again(self, why_no_more: str) -> HandoverRefused:
        """The answer where prefilling again was of no use, or would have been; the same request may come again."""
        refused = HandoverRefused(
            f"{str(self).rstrip('.')}; {why_no_more}: send the request once more in {REFUSED_RETRY_S} s.",
            self.failure,
            is_mended_by_prefill=True,
        )
        refused.status = refused.body["error"]["code"] = 503
        refused.retry_after_s = REFUSED_RETRY_S
        return refused


def bad_request(message: str, param: str | None = None, status: int = 400) -> ApiError:
    """The client must change the request."""
    return ApiError(status, message, kind="invalid_request_error", param=param)


def engine_error(status: int, message: str, retry_after_s: int | None = None) -> ApiError:
    """An engine is to blame: 502 it answered wrongly, 503 it does not answer or take requests, 504 it took too long."""
    return ApiError(status, message, kind="engine_error", retry_after_s=retry_after_s)


def too_many(message: str, retry_after_s: int) -> ApiError:
    """429: this proxy has as many requests as it takes."""
    return ApiError(429, message, kind="too_many_requests", retry_after_s=retry_after_s)


def no_room(message: str, retry_after_s: int) -> ApiError:
    """503: decode takes no more requests now."""
    return ApiError(503, message, kind="no_room", retry_after_s=retry_after_s)
