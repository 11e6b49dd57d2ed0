"""One request at a time into an ASGI application, and what it answers, without a socket."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

DEADLINE_S = 20.0


@dataclass
class Call:
    """A request under way. `leave` is the client closing its connection."""

    app: Any
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    began: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> Call:
        self.task = asyncio.ensure_future(self._run())
        return self

    async def end(self) -> Call:
        await asyncio.wait_for(self.task, DEADLINE_S)
        return self

    @property
    def json(self) -> Any:
        return json.loads(self.answer)

    async def _run(self) -> None:
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": self.body, "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.answer_headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                self.answer += message.get("body", b"")
                self.began.set()

        scope = {
            "type": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": b"",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(name.lower().encode(), value.encode()) for name, value in self.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self.app(scope, receive, send)


async def get(app: Any, path: str) -> Any:
    return (await Call(app, path, b"", method="GET").start().end()).json


async def post(app: Any, path: str, body: Any) -> Call:
    return await Call(app, path, json.dumps(body).encode()).start().end()
