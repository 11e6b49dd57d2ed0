"""``python -m pdkv.proxy``: an OpenAI-compatible server in front of prefill and decode engines.

Exit codes: 0 ended on request; 1 an engine is not reachable at start-up; 2 a setting is wrong; 130 ended by ctrl-C.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence

from pdkv.arguments import ArgumentParser
from pdkv.errors import ConfigError, PdkvError
from pdkv.proxy.app import create_app
from pdkv.proxy.server import server
from pdkv.proxy.settings import (
    DEFAULT_HEADER_TIMEOUT_S,
    DEFAULT_HOST,
    DEFAULT_MAX_BODY_NBYTES,
    DEFAULT_MAX_QUEUED,
    DEFAULT_MAX_REQUESTS,
    DEFAULT_PORT,
    DEFAULT_QUEUE_TIMEOUT_S,
    DEFAULT_READY_TIMEOUT_S,
    DEFAULT_REQUEST_TIMEOUT_S,
    ProxySettings,
)
from pdkv.proxy.upstream import Engines
from pdkv.sockets import bind, describe_bind_failure


def parse(argv: Sequence[str]) -> ProxySettings:
    """Settings from the command line; ConfigError where they are wrong."""
    p = ArgumentParser(
        prog="python -m pdkv.proxy", description="OpenAI-compatible proxy in front of prefill and decode."
    )
    for role in ("prefill", "decode"):
        p.add_argument(
            f"--{role}-url", required=True, action="append", dest=f"{role}_urls", metavar="URL",
            help=f"base URL of a {role} engine; may be given several times",
        )  # fmt: skip
    p.add_argument("--host", default=DEFAULT_HOST, help="address to listen on (default %(default)s)")
    p.add_argument("--port", type=int, default=DEFAULT_PORT, help="port (default %(default)s; 0 picks a free one)")
    for option, metavar, kind, default, text in (
        ("--ready-timeout", "S", float, DEFAULT_READY_TIMEOUT_S, "seconds until all engines must answer"),
        ("--request-timeout", "S", float, DEFAULT_REQUEST_TIMEOUT_S, "seconds for each leg of a request"),
        ("--header-timeout", "S", float, DEFAULT_HEADER_TIMEOUT_S, "seconds for a request's header to arrive"),
        ("--queue-timeout", "S", float, DEFAULT_QUEUE_TIMEOUT_S, "seconds to wait for room on decode, then 503"),
        ("--max-requests", "N", int, DEFAULT_MAX_REQUESTS, "requests under way at once, beyond them 429"),
        ("--max-queued", "N", int, DEFAULT_MAX_QUEUED, "of these, such that wait for room, beyond them 429"),
        ("--max-body", "BYTES", int, DEFAULT_MAX_BODY_NBYTES, "largest request body"),
    ):
        unit = {"BYTES": "_nbytes", "S": "_s", "N": ""}[metavar]
        name = f"{option.strip('-').replace('-', '_')}{unit}"
        p.add_argument(
            option, metavar=metavar, type=kind, default=default, dest=name, help=f"{text} (default %(default)s)"
        )
    given = vars(p.parse_args(argv))
    given.update({name: tuple(given[name]) for name in ("prefill_urls", "decode_urls")})
    return ProxySettings(**given)


def listen(settings: ProxySettings) -> socket.socket:
    """A socket bound to the settings' address; ConfigError where that is not possible."""
    try:
        return bind(settings.host, settings.port)
    except OSError as error:
        raise ConfigError(describe_bind_failure(error, settings.host, settings.port)) from error


async def serve(settings: ProxySettings, sock: socket.socket) -> None:
    """Wait for the engines, then serve until SIGINT or SIGTERM."""
    engines = Engines(settings)
    try:
        await engines.wait_ready(settings.ready_timeout_s, say)
    except BaseException:
        await engines.close()
        raise
    say(f"pdkv.proxy listens on {settings.host}:{sock.getsockname()[1]}")
    await server(create_app(settings, engines), settings).serve(sockets=[sock])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proxy; returns its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises the signal again once it has shut down
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        settings = parse(sys.argv[1:] if argv is None else argv)
        with listen(settings) as sock:
            asyncio.run(serve(settings, sock))
    except ConfigError as error:
        say(f"error: {error}")
        return 2
    except PdkvError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
