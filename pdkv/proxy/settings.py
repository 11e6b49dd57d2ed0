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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """The proxy and the two engines behind it.

    Attributes:
        prefill_url, decode_url: base URLs of the engines, without a path.
        host, port: where clients connect; port 0 has a free one picked.
        ready_timeout_s: seconds until both engines must answer at start-up.
        request_timeout_s: seconds that one leg of a request may take, prefill or decode.
        body_timeout_s: seconds in which a client must have sent its request (408).
        max_body_nbytes: requests with a larger body are refused (413).

    Raises:
        ConfigError: a value is not allowed.
    """

    prefill_url: str
    decode_url: str
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    ready_timeout_s: float = DEFAULT_READY_TIMEOUT_S
    request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    body_timeout_s: float = DEFAULT_BODY_TIMEOUT_S
    max_body_nbytes: int = DEFAULT_MAX_BODY_NBYTES

    def __post_init__(self) -> None:
        _require_base_url("--prefill-url", self.prefill_url)
        _require_base_url("--decode-url", self.decode_url)
        if self.prefill_url.rstrip("/") == self.decode_url.rstrip("/"):
            raise ConfigError(
                f"--prefill-url and --decode-url are both {self.prefill_url}; give two engines, one of each role."
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is no TCP port; give 1 to 65535, or 0 to have a free one picked.")
        for name in ("ready_timeout_s", "request_timeout_s", "body_timeout_s", "max_body_nbytes"):
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
