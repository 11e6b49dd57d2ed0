"""The proxy's side of the engines: one HTTP client, deadlines on everything, failures that name the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import msgspec

from pdkv.errors import LaunchError
from pdkv.proxy.errors import DOWN_RETRY_S, engine_error
from pdkv.proxy.request import Json
from pdkv.proxy.settings import CONNECT_TIMEOUT_S, ProxySettings

# An engine's server (uvicorn) closes idle connections after 5 s; one that is reused at that very moment fails.
_KEEPALIVE_S = 2.0
_POLL_S = 0.25
PROBE_TIMEOUT_S = 2.0


class Engine:
    """One engine as the proxy sees it: its role, for messages, its base URL, and how many requests it has from here."""

    def __init__(self, role: str, url: str, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self._session = session
        self.timeout_s = timeout_s
        self.active = 0

    @property
    def name(self) -> str:
        return f"the {self.role} engine at {self.url}"

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: Json | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; the response is open within the block, and its connection is dropped on the way out.

        The engine aborts a request whose connection is dropped, so leaving early, by cancellation too, is enough.

        Raises:
            ApiError: 503 it cannot be reached, 504 it took longer than the time limit, 502 it broke off.
        """
        timeout_s = timeout_s or self.timeout_s
        data = None if body is None else msgspec.json.encode(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_TIMEOUT_S))
        # An engine sends nobody elsewhere: what answers so is none, and a POST that followed would arrive as a GET.
        send = self._session.request(
            method, self.url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
        )
        self.active += 1
        try:
            with self.failures(timeout_s):
                async with send as response:
                    yield response
        finally:
            self.active -= 1

    @contextmanager
    def failures(self, timeout_s: float | None = None) -> Iterator[None]:
        """Turn the HTTP client's exceptions within the block into ApiError (:meth:`request` lists them)."""
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            unreachable = engine_error(
                503, f"{self.name} cannot be reached; start it, then send the request again.", DOWN_RETRY_S
            )
            unreachable.never_arrived = True
            raise unreachable from error
        except TimeoutError as error:
            raise engine_error(504, f"{self.name} did not answer within {timeout_s or self.timeout_s:g} s.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise engine_error(
                502, f"{self.name} broke off its answer ({type(error).__name__}); see its log."
            ) from error

    async def healthy(self) -> bool:
        """Whether ``/health`` answers 200 now."""
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        try:
            async with self._session.get(f"{self.url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False


class Engines:
    """All engines and the connections to them. Made and closed within one event loop."""

    def __init__(self, settings: ProxySettings) -> None:
        # The number of connections has no limit of its own: the number of requests has one.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, trust_env=False)
        timeout_s = settings.request_timeout_s
        self.prefill = [Engine("prefill", url, self._session, timeout_s) for url in settings.prefill_urls]
        self.decode = [Engine("decode", url, self._session, timeout_s) for url in settings.decode_urls]

    async def wait_ready(self, timeout_s: float, report: Callable[[str], None]) -> None:
        """Wait until all answer; LaunchError names the one that does not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for engine in (*self.prefill, *self.decode):
            told = False
            while not await engine.healthy():
                if time.monotonic() >= deadline:
                    raise LaunchError(
                        f"{engine.name} did not answer /health within {timeout_s:g} s; "
                        f"start it, or correct --{engine.role}-url."
                    )
                if not told:
                    report(f"waiting for {engine.name}, up to {timeout_s:g} s")
                    told = True
                await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        await self._session.close()
