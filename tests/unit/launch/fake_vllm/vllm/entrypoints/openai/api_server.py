"""A stand-in for vLLM's API server: real processes of the same shape, without a model.

Like vLLM it starts grandchildren, one of them in a session of its own. ``FAKE_ENGINE`` says how it behaves: ``serve``
(default), ``die`` (log an engine's failure as three processes of vLLM do, exit 1), ``hang`` (never listen) or
``stubborn`` (ignore SIGTERM). Each process leaves its pid as a file name in ``FAKE_PIDS``, and ``sigterm-PID`` where
the first process got SIGTERM.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PIDS = Path(os.environ["FAKE_PIDS"])
MODE = os.environ.get("FAKE_ENGINE", "serve")
FAILURE = """\
(EngineCore pid=7) ERROR 11-29 22:00:01 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 22:00:01 [core.py:1100]   File "growth.py", line 1, in extend
(EngineCore pid=7) ERROR 11-29 22:00:01 [core.py:1100] pdkv.errors.CapacityError: 3 blocks hold no request; raise it.
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7) pdkv.errors.CapacityError: 3 blocks hold no request; raise it.
(APIServer pid=6) Traceback (most recent call last):
(APIServer pid=6)   File "core_client.py", line 2, in __init__
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({}, 200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        params = request["kv_transfer_params"]
        handed_over = {"do_remote_prefill": True, "remote_block_ids": [[1]]} if params.get("do_remote_decode") else None
        self.answer({"choices": [{"index": 0, "text": " Paris"}], "kv_transfer_params": handed_over})

    def answer(self, content: object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def start_grandchildren() -> None:
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    for process in (subprocess.Popen(sleeper), subprocess.Popen(sleeper, start_new_session=True)):
        (PIDS / str(process.pid)).touch()


def on_sigterm(signum: int, frame: object) -> None:
    (PIDS / f"sigterm-{os.getpid()}").touch()
    if MODE != "stubborn":
        sys.exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    port = parser.parse_known_args()[0].port
    (PIDS / str(os.getpid())).touch()
    signal.signal(signal.SIGTERM, on_sigterm)
    start_grandchildren()
    if MODE == "die":
        sys.stderr.write(FAILURE)
        sys.exit(1)
    if MODE == "hang":
        print("still compiling", flush=True)
        time.sleep(600)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
