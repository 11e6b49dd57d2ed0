"""The prefill leg of a request, and how what it left behind is freed when nobody will come for it.

A finished prefill holds its blocks under a lease until decode has read them. A request whose client leaves is given up
on prefill by its id, and not by closing the connection: so the proxy learns whether the prompt was finished at that
very moment, and can have decode tell prefill that nobody will come. Stock engines have neither endpoint; there the
connection is closed, and the lease runs out by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from pdkv.proxy import request as legs
from pdkv.proxy.answers import raise_for_status, read_json
from pdkv.proxy.errors import ApiError, engine_error
from pdkv.proxy.upstream import Engine

logger = logging.getLogger("pdkv.proxy")

#: Seconds for an engine to answer that it has given a request up, and for the request itself to end then.
GIVE_UP_TIMEOUT_S = 5.0


class PrefillLeg:
    """One request on prefill.

    Args:
        timeout_s: for one engine to answer.
        last: an engine that is asked where no other is there: KV from it came too late, or was of what is gone.

    Attributes:
        engine: who computes the prompt, or has.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        path: str,
        headers: dict[str, str],
        body: legs.Json,
        timeout_s: float,
        last: Engine | None = None,
    ) -> None:
        self._engines = sorted(engines, key=lambda engine: (engine is last, engine.active))
        self._path, self.headers, self._body, self._timeout_s = path, headers, body, timeout_s
        self.engine = self._engines[0]

    async def run(self) -> legs.Json:
        """The transfer parameters of the prompt, from the first engine in order of load that can be reached."""
        *first, last = self._engines
        for engine in first:
            self.engine = engine
            try:
                return await self._run_on(engine)
            except ApiError as error:
                if not error.never_arrived:
                    raise
                logger.warning("%s; trying the next", error)
        self.engine = last
        return await self._run_on(last)

    async def _run_on(self, engine: Engine) -> legs.Json:
        leg = legs.prefill_request(self._body, chat="chat" in self._path)
        async with engine.request("POST", self._path, self.headers, leg, self._timeout_s) as response:
            content = await response.read()
            raise_for_status(engine, response, content)
            try:
                answer = read_json(content)
            except msgspec.DecodeError as error:
                raise engine_error(502, f"the prefill engine's answer is not valid JSON: {error}") from error
        return legs.transfer_params(answer)

    async def give_up(self, running: asyncio.Task[legs.Json]) -> legs.Json | None:
        """End `running`, which is :meth:`run`. Returns the parameters of a prompt that was finished all the same."""
        try:
            async with asyncio.timeout(GIVE_UP_TIMEOUT_S):
                if await self._abort():
                    return await asyncio.shield(running)
        except TimeoutError:
            logger.warning("%s %s did not give the request up in time", self.headers["X-Request-Id"], self.engine.name)
        except ApiError:
            return None  # it was given up, or had failed before: there is nothing to free
        finally:
            running.cancel()
        return None

    async def _abort(self) -> bool:
        body = {"request_id": self.headers["X-Request-Id"]}
        async with self.engine.request("POST", "/v1/pdkv/abort", self.headers, body, GIVE_UP_TIMEOUT_S) as response:
            return response.status == 200


async def release(params: legs.Json, headers: dict[str, str], engines: Sequence[Engine]) -> None:
    """Have one of the decode `engines` tell prefill that nobody will come for the blocks."""
    for engine in engines:
        try:
            body = {"kv_transfer_params": params}
            async with engine.request("POST", "/v1/pdkv/release", headers, body, GIVE_UP_TIMEOUT_S) as response:
                if response.status == 200:
                    return
        except ApiError as error:
            logger.warning("%s %s", headers["X-Request-Id"], error)
    logger.warning("%s: its blocks on prefill stay until their lease runs out", headers["X-Request-Id"])


class Background:
    """Work that goes on when its request has been answered. Each piece has a deadline of its own."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for all of it."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
