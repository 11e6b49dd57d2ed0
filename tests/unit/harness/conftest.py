"""A real HTTP server that speaks as much of vLLM's API as the harness uses."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from harness_protocol import Endpoint, Respond


@pytest.fixture
def serve() -> Iterator[Callable[[Respond], Endpoint]]:
    """Start servers that answer by a function of path and body; all end with the test."""
    endpoints: list[Endpoint] = []

    def start(respond: Respond) -> Endpoint:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append((self.path, body))
                self.reply(*respond(self.path, body))

            def reply(self, status: int, content: Any) -> None:
                payload = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # a client may give up: some tests are about that
                    self.wfile.write(payload)

            def log_message(self, *args: object) -> None:
                """Nothing: pytest shows what failed."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        endpoint = Endpoint(f"http://127.0.0.1:{server.server_port}", server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        endpoints.append(endpoint)
        return endpoint

    yield start
    for endpoint in endpoints:
        endpoint.server.shutdown()
        endpoint.server.server_close()
