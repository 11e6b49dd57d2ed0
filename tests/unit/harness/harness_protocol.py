"""What an endpoint and an engine of a healthy run say, in the words of their protocols."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

Respond = Callable[[str, dict[str, Any]], tuple[int, Any]]


def answer_with(token_ids: list[int], text: str = "#### 1", *, chat: bool = False) -> dict[str, Any]:
    """A response body as vLLM 0.32 gives it for `return_token_ids`."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": token_ids}
    choice.update({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
    return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": len(token_ids)}}


@dataclass
class Endpoint:
    """A running server: its URL, and the requests it was asked, in the order of their arrival."""

    url: str
    server: ThreadingHTTPServer
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def worker_status(**changes: Any) -> dict[str, Any]:
    """What rank 0 of a healthy engine writes."""
    return {
        "capacity_blocks": 400,
        "warmup_blocks": 33,
        "final_blocks": 200,
        "bytes_reserved": 800 << 20,
        "bytes_committed": 400 << 20,
        "segments": 30,
        "chunks_per_segment": 1,
        "generation": 1,
        "connector_created_after_extend": True,
        **changes,
    }
