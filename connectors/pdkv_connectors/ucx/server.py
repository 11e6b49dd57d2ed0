"""The end of UCX connections that serves a registered cache. For the loop's thread only."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

from pdkv.errors import ProtocolError
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.ucx.link import Link
from pdkv_connectors.ucx.memory import Memory
from pdkv_connectors.ucx.wire import MAX_HELLO_NBYTES, Answer, Ask, Bye, End, Go, Hello, No, Question, arrays_of

logger = logging.getLogger(__name__)

HELLO_S = 5.0
MAX_ASKED = 64  # transfers of one peer at once; further ones wait on the wire


#: A thread that answers a question leaves the interpreter to others for so long between two steps.
STEP_PAUSE_S = 50e-6

Steps = Generator[None, None, bytes]


class Server:
    """Listens from :meth:`start` to :meth:`stop`; afterwards nothing touches the memory.

    Args:
        answer: answers questions about sums, in steps and in a thread of its own; None where none are kept.
    """

    def __init__(
        self,
        ucx: Any,
        memory: Memory,
        engine: EngineRef,
        counts: Counter[str],
        answer: Callable[[bytes], Steps] | None = None,
    ) -> None:
        self.token = secrets.token_bytes(32)
        self._ucx = ucx
        self._memory = memory
        self._engine = engine
        self._counts = counts
        self._answer = answer
        self._links: dict[Link, asyncio.Task[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: Any = None
        self._stopping = False

    async def start(self, port: int) -> int:
        """Listen, on all of the machine's addresses: UCX knows nothing else. The port that it really is."""
        self._listener = self._ucx.create_listener(self._connected, port)
        return int(self._listener.port)

    async def stop(self, reason: str) -> None:
        """Say BYE, close all connections, and wait until nothing is under way any more."""
        self._stopping = True
        leaving = [asyncio.ensure_future(link.leave(reason, handler)) for link, handler in self._links.items()]
        if leaving:
            await asyncio.wait(leaving)
        if under_way := [*self._tasks, *self._links.values()]:
            await asyncio.wait(under_way)
        if self._listener is not None:  # last: it does not let go of connections that it has accepted
            self._listener.close()
            self._listener = None

    async def _connected(self, endpoint: Any) -> None:
        link, handler = Link(endpoint), asyncio.current_task()
        assert handler is not None
        self._links[link] = handler
        try:
            if self._stopping:
                return
            await asyncio.wait_for(self._greet(link), HELLO_S)
            await self._serve(link)
        except Exception as error:
            logger.debug("A UCX connection has ended: %s", error)
        finally:
            link.close("served")
            del self._links[link]

    async def _greet(self, link: Link) -> None:
        hello = await link.receive(MAX_HELLO_NBYTES)
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token, self.token):
            self._counts["strangers"] += 1
            logger.warning("A UCX connection was refused: it does not know this registration's token.")
            raise ProtocolError("a UCX peer does not know the token.")
        await link.send(Go(0))

    async def _serve(self, link: Link) -> None:
        room = asyncio.Semaphore(MAX_ASKED)
        while True:
            ask = await link.receive()
            if isinstance(ask, Bye):
                return
            if not isinstance(ask, Ask | Question):
                raise ProtocolError("a UCX peer said what it cannot at this moment.")
            await room.acquire()
            serve = self._serve_one(link, ask) if isinstance(ask, Ask) else self._answer_one(link, ask)
            task = asyncio.ensure_future(serve)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: room.release())

    async def _serve_one(self, link: Link, ask: Ask) -> None:
        try:
            refusal = self._refusal(ask)
            if refusal is not None:
                self._counts["asks_refused"] += 1
                await link.send(No(ask.number, refusal[:512]))
                return
            offsets, nbytes = arrays_of(ask)
            await link.send(Go(ask.number))
            move = link.send_bytes if ask.reads else link.receive_bytes
            await move(ask.number, self._memory, offsets, nbytes)
            await link.send(End(ask.number))
            self._counts["served"] += 1
        except Exception as error:
            link.close(f"a transfer of the peer failed ({error})")

    def _refusal(self, ask: Ask) -> str | None:
        """Why these bytes are not for the peer; None where they are."""
        if ask.server != self._engine:
            return f"{ask.server} was asked, this is {self._engine}"
        try:
            self._memory.require_committed(*arrays_of(ask))
        except ProtocolError as error:
            return str(error)
        return None

    async def _answer_one(self, link: Link, question: Question) -> None:
        try:
            if self._answer is None:
                await link.send(No(question.number, "it keeps no sums"))
                return
            # Summing takes a while, and whoever else this thread serves is not to wait for it.
            body = await asyncio.to_thread(_worked_off, self._answer(question.body))
            await link.send(Answer(question.number, body))
        except Exception as error:
            link.close(f"a question of the peer could not be answered ({error})")


def _worked_off(steps: Steps) -> bytes:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            body: bytes = done.value
            return body
        time.sleep(STEP_PAUSE_S)
