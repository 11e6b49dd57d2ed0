"""One UCX connection: control messages in order, and the bytes of transfers beside them. For the loop's thread only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable
from typing import Any

from pdkv.errors import ProtocolError, TransportError
from pdkv_connectors.ucx.memory import Memory, Part, parts_of
from pdkv_connectors.ucx.wire import (
    HEADER_NBYTES,
    MAX_CONTROL_NBYTES,
    Answer,
    Array,
    Ask,
    Bye,
    Control,
    End,
    Go,
    No,
    Question,
    body_nbytes,
    decode_control,
    encode_control,
)

logger = logging.getLogger(__name__)

Said = Go | No | End | Answer

CONTROL_TAG = 0
#: Messages of one transfer that are on their way at once.
WINDOW = 4
BYE_S = 0.5


class Link:
    """See the module's docstring. Any failure closes it: UCX's state after one is nothing to build on."""

    def __init__(self, endpoint: Any) -> None:
        self.closed: str | None = None  # why
        self._endpoint = endpoint
        self._sending = asyncio.Lock()

    async def send(self, control: Control) -> None:
        header, body = encode_control(control)
        async with self._sending:
            await self._send(bytearray(header), CONTROL_TAG)
            await self._send(bytearray(body), CONTROL_TAG)

    async def receive(self, most: int = MAX_CONTROL_NBYTES) -> Control:
        header = bytearray(HEADER_NBYTES)
        await self._receive(header, CONTROL_TAG)
        body = bytearray(body_nbytes(bytes(header), most))
        await self._receive(body, CONTROL_TAG)
        return decode_control(bytes(body))

    async def send_bytes(self, number: int, memory: Memory, offsets: Array, nbytes: Array) -> None:
        """Send all copies of a transfer."""
        memory.ready()
        underway: deque[asyncio.Future[Any]] = deque()
        try:
            for index, part in enumerate(parts_of(nbytes)):
                if len(underway) == WINDOW:
                    await underway.popleft()
                buffer = memory.outgoing(part, offsets, nbytes)
                underway.append(asyncio.ensure_future(self._send(buffer, _tag(number, index))))
                await asyncio.sleep(0)  # let it start, and others have their turn
            while underway:
                await underway.popleft()
        finally:
            await self._give_up(underway)

    async def receive_bytes(self, number: int, memory: Memory, offsets: Array, nbytes: Array) -> None:
        """Receive all copies of a transfer, each to where it belongs."""
        underway: deque[asyncio.Future[Any]] = deque()
        waiting: deque[tuple[Any, Part]] = deque()

        async def take_one() -> None:
            await underway.popleft()
            buffer, part = waiting.popleft()
            memory.unpack(buffer, part, offsets, nbytes)

        try:
            for index, part in enumerate(parts_of(nbytes)):
                if len(underway) == WINDOW:
                    await take_one()
                buffer = memory.incoming(part, offsets)
                waiting.append((buffer, part))
                underway.append(asyncio.ensure_future(self._receive(buffer, _tag(number, index))))
            while underway:
                await take_one()
            memory.ready()
        finally:
            await self._give_up(underway)

    async def _give_up(self, underway: deque[asyncio.Future[Any]]) -> None:
        """After a failure: what is under way may touch memory until the connection is closed and it has ended."""
        if underway:
            self.close("a transfer failed")
            await asyncio.wait(underway, timeout=5.0)

    async def _send(self, buffer: Any, tag: int) -> None:
        self._require_open()
        await _translated(self._endpoint.send(buffer, tag=tag))

    async def _receive(self, buffer: Any, tag: int) -> None:
        self._require_open()
        await _translated(self._endpoint.recv(buffer, tag=tag))

    def _require_open(self) -> None:
        if self.closed is not None:
            raise TransportError(f"the UCX connection to the peer is closed: {self.closed}; handshake again.")

    async def leave(self, reason: str, reader: asyncio.Future[Any]) -> None:
        """Have the peer close the connection, and close it here when `reader` has noticed.

        In this order, since UCX 1.21 loses a socket where a connection is closed under a receive at both ends.
        """
        if self.closed is None:
            with contextlib.suppress(Exception):  # the peer may have gone already
                await asyncio.wait_for(self.send(Bye(reason[:512])), BYE_S)
            await asyncio.wait([reader], timeout=BYE_S)
        self.close(reason)

    def close(self, reason: str) -> None:
        """Idempotent. Sends and receives that are under way end with an error."""
        if self.closed is None:
            self.closed = reason
            try:
                self._endpoint.abort()
            except Exception as error:  # it is gone, which is what was wanted
                logger.debug("UCX could not close a connection: %s", error)
            self._endpoint = None


class AskingLink(Link):
    """The end that connected. A task reads what the server says.

    Attributes:
        verifies: whether the server keeps sums, and wants what is written there to be compared.
    """

    def __init__(self, endpoint: Any, *, verifies: bool) -> None:
        super().__init__(endpoint)
        self.verifies = verifies
        self._answers: dict[int, asyncio.Queue[Said]] = {}
        self._number = 0
        self._reader = asyncio.ensure_future(self._read())

    async def transfer(self, ask: Ask, memory: Memory, offsets: Array, nbytes: Array) -> None:
        """One READ or WRITE, to its end. `ask.number` is set here; offsets are our own side's.

        Raises:
            TransportError: it failed; nothing of it is in flight.
        """
        self._number += 1
        number = self._number
        answers = self._answers[number] = asyncio.Queue()
        try:
            self._require_open()
            await self.send(Ask(number, ask.server, ask.reads, ask.offsets, ask.nbytes))
            await self._answer(answers, Go)
            if ask.reads:
                await self.receive_bytes(number, memory, offsets, nbytes)
            else:
                await self.send_bytes(number, memory, offsets, nbytes)
            await self._answer(answers, End)
        except TransportError as error:
            raise TransportError(f"{error} (the connection: {self.closed})" if self.closed else str(error)) from None
        finally:
            del self._answers[number]

    async def ask(self, body: bytes) -> bytes:
        """The answer to a question about sums. Raises TransportError where there is none."""
        self._number += 1
        number = self._number
        answers = self._answers[number] = asyncio.Queue()
        try:
            self._require_open()
            await self.send(Question(number, body))
            answer = await self._answer(answers, Answer)
        finally:
            del self._answers[number]
        return answer.body if isinstance(answer, Answer) else b""

    async def disconnect(self) -> None:
        await self.leave("disconnected", self._reader)

    async def greeted(self) -> None:
        """Wait until HELLO has been answered."""
        answers = self._answers[0] = asyncio.Queue()
        await self._answer(answers, Go)
        del self._answers[0]

    def close(self, reason: str) -> None:
        super().close(reason)
        for number, answers in self._answers.items():
            answers.put_nowait(No(number, reason[:512]))

    async def _answer(self, answers: asyncio.Queue[Said], wanted: type) -> Said:
        answer = await answers.get()
        if isinstance(answer, No):
            raise TransportError(f"the peer does not serve the transfer: {answer.reason.rstrip('.')}.")
        if not isinstance(answer, wanted):
            raise ProtocolError(f"a UCX peer answered {type(answer).__name__} where {wanted.__name__} was due.")
        return answer

    async def _read(self) -> None:
        try:
            while True:
                match await self.receive():
                    case Go() | No() | End() | Answer() as answer if answer.number in self._answers:
                        self._answers[answer.number].put_nowait(answer)
                    case Bye(reason):
                        self.close(reason)
                        return
                    case _:
                        raise ProtocolError("a UCX peer said what it cannot at this moment.")
        except Exception as error:
            self.close(f"the connection has ended ({error})")


def _tag(number: int, index: int) -> int:
    return (number << 24) + index + 1


async def _translated(work: Awaitable[Any]) -> None:
    """Any error of UCX as ours, without its traceback: UCX keeps the error, and with it the connection would stay."""
    try:
        await work
        return
    except Exception as error:
        error.__traceback__ = None
        text = f"{type(error).__name__}: {error}"
    raise TransportError(f"UCX reported {text}.")
