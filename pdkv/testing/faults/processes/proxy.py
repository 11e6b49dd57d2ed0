"""A TCP proxy between two side channels that loses, delays, repeats and cuts.

Bytes cannot be lost one by one from TCP, so whole ZeroMQ messages are: the proxy knows as much of ZMTP 3 as it takes to
see where they end. Connections are without encryption, as between side channels of one machine without keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

GREETING_NBYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_START_S = 10.0


@dataclass(frozen=True, slots=True)
class Weather:
    """What may befall each message, as probabilities; delays last from `delay_s[0]` to `delay_s[1]` seconds."""

    drop: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.5)


class FaultProxy:
    """Listens on a port of its own and forwards to `upstream`, both ways; used from one thread, runs in another.

    Attributes:
        address: where to connect, ``host:port``.
        weather: may be changed at any time.
        injected: how often each fault happened.
    """

    def __init__(self, seed: int = 0) -> None:
        self.address = ""
        self.weather = Weather()
        self.injected: Counter[str] = Counter()
        self.partitioned = False
        self._holding = False
        self._held: list[tuple[bytes, asyncio.StreamWriter]] = []
        self._random = Random(seed)
        self._upstream = ("", 0)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="pdkv-fault-proxy", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise TimeoutError(f"the fault proxy did not start within {_START_S:g} s")

    def forward_to(self, address: str) -> None:
        """Where new connections lead from now on; the old ones are cut."""
        host, _, port = address.rpartition(":")
        self._upstream = (host, int(port))
        self._call(self._cut)

    def cut(self) -> None:
        """Close every connection; both sides connect again by themselves."""
        self.injected["cut"] += 1
        self._call(self._cut)

    def partition(self, on: bool) -> None:
        """Let no message through, or let them through again; connections stay."""
        if on:
            self.injected["partition"] += 1
        self.partitioned = on

    def hold(self, on: bool) -> None:
        """Keep what comes, or let it go on in the order in which it came."""
        self._holding = on
        if not on:
            self._call(self._release)

    def holds(self, what: bytes) -> bool:
        """Whether a message is being kept that has these bytes in it."""
        return any(what in message for message, _ in list(self._held))

    def calm_down(self) -> None:
        """Let everything through, as at the beginning."""
        self.weather = Weather()
        self.partition(False)
        self.hold(False)

    def close(self) -> None:
        """Close everything. Idempotent."""
        if self._thread.is_alive() and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_START_S)

    # In the proxy's thread.

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _call(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
        self._writers.clear()

    def _release(self) -> None:
        held, self._held = self._held, []
        for message, writer in held:
            if not writer.is_closing():
                writer.write(message)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.wait_for(asyncio.open_connection(*self._upstream), 2.0)
        except (OSError, TimeoutError):
            writer.transport.abort()
            return
        self._writers |= {writer, there[1]}
        for one_way in (self._pump(reader, there[1]), self._pump(there[0], writer)):
            self._start(one_way)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until either end closes."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, RuntimeError):
            await _pass_greeting(reader, writer)
            while True:
                message, is_command = await _read_message(reader)
                if is_command:
                    writer.write(message)
                else:
                    self._forward(message, writer)
                await writer.drain()
        writer.close()

    def _forward(self, message: bytes, writer: asyncio.StreamWriter) -> None:
        weather, chance = self.weather, self._random.random
        if self._holding:
            self._held.append((message, writer))
        elif self.partitioned:
            self.injected["partitioned"] += 1
        elif chance() < weather.drop:
            self.injected["drop"] += 1
        elif chance() < weather.delay:
            self.injected["delay"] += 1
            self._start(self._later(message, writer, self._random.uniform(*weather.delay_s)))
        else:
            writer.write(message)
            if chance() < weather.duplicate:
                self.injected["duplicate"] += 1
                writer.write(message)

    async def _later(self, message: bytes, writer: asyncio.StreamWriter, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        if not writer.is_closing():
            writer.write(message)


async def _pass_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As it comes: each side sends its second part when it has seen the other's first."""
    left = GREETING_NBYTES
    while left and (part := await reader.read(left)):
        writer.write(part)
        left -= len(part)


async def _read_message(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """All frames of the next message, or one command; and whether it was a command.

    A frame is a byte of flags, its length in 1 byte or, where it is long, in 8, and that many bytes (ZMTP 3.1).
    """
    frames = b""
    while True:
        flags = await reader.readexactly(1)
        length = await reader.readexactly(8 if flags[0] & _LONG else 1)
        frames += flags + length + await reader.readexactly(int.from_bytes(length, "big"))
        if flags[0] & _COMMAND or not flags[0] & _MORE:
            return frames, bool(flags[0] & _COMMAND)
