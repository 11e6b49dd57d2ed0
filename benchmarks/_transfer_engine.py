"""The rows of a decode engine, vLLM itself, beside transfers that arrive over ipc while it decodes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from _decode_engine import CONTEXT, DecodeEngine
from _transfer_cache import build, require_moved
from _transfer_ipc_reader import BLOCK_NBYTES, LAYERS, TIMEOUT_S, Reader, scattered
from _transfer_rows import Row, reference, time_ratio, within

from pdkv.testing.child import Child
from pdkv.transfer.transport import Transfer
from pdkv_connectors.ipc import BlockColumns

BLOCKS = 2048  # of 1 MiB
NBYTES = BLOCKS * BLOCK_NBYTES
TURNS, STEPS_OF_A_TURN, SKIPPED = 10, 12, 2
DEPTH = 8


def engine_rows(owner: Child, quick: bool, say: Callable[[str], None]) -> Iterator[Row]:
    """All rows; raises SystemExit where a byte is wrong. What an engine's step takes is a mean."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdkv-engine-")))
        engine = DecodeEngine(folder)
        say("the engine decodes")
        there = owner.ask("build", layers=LAYERS, blocks=2 * BLOCKS)
        cache = build("cuda", layers=LAYERS, blocks=2 * BLOCKS)
        stack.callback(cache.close)
        pairs = BlockColumns(*(scattered(2 * BLOCKS, BLOCKS, seed) for seed in (7, 8)))
        reader = Reader(cache, there, is_decoding=lambda: True)
        stack.callback(reader.transport.close)
        yield from _beside(engine, Stream(reader, pairs), 4 if quick else TURNS)
        require_moved(cache, pairs.source.tolist(), pairs.destination.tolist())


class Stream:
    """Transfers of the same blocks, one after the other."""

    def __init__(self, reader: Reader, pairs: BlockColumns) -> None:
        self._reader = reader
        self._pairs = pairs
        self._running: deque[Transfer] = deque()
        # Only the device sees an end at once: this process is at work on the next step.
        self._stream = torch.cuda.ExternalStream(reader.transport._movers[0].stream)
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def post_one(self) -> None:
        """Post one, none being under way, and have the device take its time, from before it is asked for."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(self._stream)
        self.post(1)
        ended.record(self._stream)
        self._timed.append((began, ended))

    def seconds(self) -> list[float]:
        """Of each of :meth:`post_one`."""
        torch.cuda.synchronize()
        return [began.elapsed_time(ended) / 1e3 for began, ended in self._timed]

    def post(self, depth: int) -> None:
        """Let so many run or wait their turn."""
        while self._running and self._running[0].poll() != "running":
            self._require_done(self._running.popleft())
        while len(self._running) < depth:
            self._running.append(self._reader.transport.read(self._reader.peer, self._pairs))

    @property
    def is_last_running(self) -> bool:
        """Whether what was posted last has not ended."""
        return bool(self._running) and self._running[-1].poll() == "running"

    def end(self) -> None:
        """Wait for all."""
        while self._running:
            transfer = self._running.popleft()
            transfer.wait(TIMEOUT_S)
            self._require_done(transfer)

    def _require_done(self, transfer: Transfer) -> None:
        if transfer.poll() != "done":
            raise SystemExit(f"transfer: {transfer.reason}")


def _beside(engine: DecodeEngine, stream: Stream, turns: int) -> Iterator[Row]:
    alone, with_one, with_many = _steps_in_turns(engine, stream, turns)
    base = reference(f"vLLM, 8B Llama, 32 requests of {CONTEXT} tokens: a decode step alone", [alone])
    yield base
    lost = f"{(with_one - alone) * 1e3:.2f} ms more"
    yield time_ratio("the same, a step in which 2 GiB arrive, throttled", [with_one], base, 1.15, note=lost)
    # 400 GB/s is what the transfer must reach.
    yield within("the same, those 2 GiB", stream.seconds(), NBYTES / 400e9, NBYTES)
    yield time_ratio("the same, a step all through which transfers run, throttled", [with_many], base, None)


def _steps_in_turns(engine: DecodeEngine, stream: Stream, turns: int) -> tuple[float, float, float]:
    """Mean times of steps: alone, with one transfer posted at the beginning of each, and with transfers all the time.

    In turns, since steps take longer as the requests' contexts grow.
    """
    times: dict[int, list[float]] = {0: [], 1: [], DEPTH: []}
    for _ in range(turns):
        for depth in times:
            for number in range(STEPS_OF_A_TURN):
                if depth == 1:
                    stream.end()
                began = time.perf_counter()
                if depth == 1:
                    stream.post_one()
                elif depth:
                    stream.post(depth)
                engine.step()
                ended = time.perf_counter()
                if depth == DEPTH and not stream.is_last_running:
                    raise SystemExit(f"transfer: {DEPTH} transfers ended within a decode step")
                if number >= SKIPPED:
                    times[depth].append(ended - began)
            stream.end()
    alone, with_one, with_many = (statistics.fmean(each) for each in times.values())
    return alone, with_one, with_many
