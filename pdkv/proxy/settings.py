"""What the proxy is told: frozen and validated when built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from urllib.parse import urlsplit

from pdkv.errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_READY_TIMEOUT_S = 30.0
# A long prompt on a busy CPU takes minutes; a request that takes longer than this has lost its engine.
DEFAULT_REQUEST_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 5.0
DEFAULT_BODY_TIMEOUT_S = 30.0
# Prompts are text: 16 MiB is some 4 million tokens, more than any model's context.
DEFAULT_MAX_BODY_NBYTES = 16 * 2**20
DEFAULT_MAX_REQUESTS = 1024
DEFAULT_MAX_QUEUED = 128
# Clients that meet a burst rather wait some seconds than try again; longer, and they have given up themselves.
DEFAULT_QUEUE_TIMEOUT_S = 30.0
# A header is one packet; a client that needs longer holds a connection and does nothing with it. A client whose machine
# is overloaded may connect and send nothing for ten seconds and more.
DEFAULT_HEADER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """The proxy and the engines behind it.

    Attributes:
        prefill_urls, decode_urls: base URLs of the engines of each role, without a path; at least one of each.
        host, port: where clients connect; port 0 has a free one picked.
        ready_timeout_s: seconds until all engines must answer at start-up.
        request_timeout_s: seconds that one leg of a request may take, prefill or decode.
        header_timeout_s: seconds in which a client must have sent a request's header, or it is disconnected.
        body_timeout_s: seconds in which a client must have sent its request (408).
        max_body_nbytes: requests with a larger body are refused (413).
        max_requests: requests that may be under way at once; more are refused (429).
        max_queued: of these, such that wait for room on decode; more are refused (429).
        queue_timeout_s: seconds that one may wait for room; then it is refused (503).

    Raises:
        ConfigError: a value is not allowed.
    """

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    ready_timeout_s: float = DEFAULT_READY_TIMEOUT_S
    request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    header_timeout_s: float = DEFAULT_HEADER_TIMEOUT_S
    body_timeout_s: float = DEFAULT_BODY_TIMEOUT_S
    max_body_nbytes: int = DEFAULT_MAX_BODY_NBYTES
    max_requests: int = DEFAULT_MAX_REQUESTS
    max_queued: int = DEFAULT_MAX_QUEUED
    queue_timeout_s: float = DEFAULT_QUEUE_TIMEOUT_S

    def __post_init__(self) -> None:
        for option, urls in (("--prefill-url", self.prefill_urls), ("--decode-url", self.decode_urls)):
            if not urls:
                raise ConfigError(f"{option} is missing; give the base URL of at least one engine of that role.")
            for url in urls:
                _require_base_url(option, url)
        every = [url.rstrip("/") for url in (*self.prefill_urls, *self.decode_urls)]
        for url in every:
            if every.count(url) > 1:
                raise ConfigError(
                    f"{url} is given twice (--prefill-url and --decode-url are both {url}, or one of them names it "
                    "again); give each engine once, with its role."
                )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is no TCP port; give 1 to 65535, or 0 to have a free one picked.")
        for name in (
            *("ready_timeout_s", "request_timeout_s", "header_timeout_s", "body_timeout_s", "queue_timeout_s"),
            *("max_body_nbytes", "max_requests", "max_queued"),
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a number above 0.")


def _require_base_url(option: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # what resolving it does first; fails on empty and overlong labels
    except ValueError:
        usable = False
    if not usable or parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{option} {url!r} is no base URL; give scheme, host and port, e.g. http://127.0.0.1:8100.")
