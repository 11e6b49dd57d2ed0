"""The rows of one GPU: ipc beside a plain copy of the device, with sums, with conversions, beside decoding."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import ceil
from typing import Any

import torch
from _decode_steps import STEPS, Decoding
from _transfer_cache import build, require_moved
from _transfer_ipc_reader import BLOCK_NBYTES, LAYERS, TIMEOUT_S, TOKENS, Reader, scattered
from _transfer_rows import Row, bandwidth_share, interleaved, reference, time_ratio, within

from pdkv.kvcache import GrowableKVCache
from pdkv.testing.child import Child
from pdkv.transfer.transport import Transfer
from pdkv_connectors.ipc import BlockColumns

SWEEP = (16, 32, 64, 132)
NUM_STEPS = 300


def cuda_rows(owner: Child, quick: bool, say: Callable[[str], None]) -> Iterator[Row]:
    """All rows, as they come; raises SystemExit where a byte is wrong."""
    repeats = _repeats(quick)
    with ExitStack() as stack:
        there, cache, plain, checked = _readers(stack, owner, quick)
        largest = min(2048, cache.num_committed_blocks // 2)
        yield from _copies(cache, plain, checked, largest, repeats)
        say("copies done")
        yield from _conversions(stack, plain, there, cache.num_committed_blocks, largest, repeats)
        say("conversions done")
        if not quick:
            yield from _beside_decoding(cache, there, largest)


def cards_rows(owner: Child, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """The rows of an owner on the second card; raises SystemExit where a byte is wrong."""
    with ExitStack() as stack:
        _, cache, plain, checked = _readers(stack, owner, quick)
        largest = min(2048, cache.num_committed_blocks // 2)
        rows = _copies(cache, plain, checked, largest, _repeats(quick), source="cuda:1")
    say("copies between cards done")
    return rows


def _repeats(quick: bool) -> int:
    return 5 if quick else 20


def _readers(stack: ExitStack, owner: Child, quick: bool) -> tuple[dict[str, Any], GrowableKVCache, Reader, Reader]:
    """How the owner is reached, a cache on this process's first card, and who reads into it: unverified, verified."""
    blocks = 512 if quick else 4096
    there = owner.ask("build", layers=LAYERS, blocks=blocks)
    cache = build("cuda", layers=LAYERS, blocks=blocks)
    stack.callback(cache.close)
    plain, checked = Reader(cache, there, verify=False), Reader(cache, there)
    for reader in (checked, plain):
        stack.callback(reader.transport.close)
    return there, cache, plain, checked


def _copies(
    cache: GrowableKVCache, plain: Reader, checked: Reader, largest: int, repeats: int, source: str = "cuda:0"
) -> list[Row]:
    """Scattered copies beside torch's copy of as many bytes from the owner's card, `source`.

    Between cards nothing is promised: the rows have no targets.
    """
    rows = []
    between = source != "cuda:0"
    where = "ipc between cards" if between else "ipc"
    nbytes = largest * BLOCK_NBYTES
    from_, to = (torch.empty(nbytes, dtype=torch.int8, device=device) for device in (source, "cuda:0"))

    def device_copy() -> None:
        to.copy_(from_)
        torch.cuda.synchronize(to.device)
        torch.cuda.synchronize(from_.device)

    pairs = {count: BlockColumns(*(scattered(cache.num_committed_blocks, count, seed) for seed in (1, 2)))
             for count in (largest, 128, 64, 8, 1)}  # fmt: skip
    times = interleaved(
        {
            "copy": device_copy,
            "plain": lambda: plain.read(pairs[largest]),
            "checked": lambda: checked.read(pairs[largest]),
        },
        repeats,
    )
    require_moved(cache, pairs[largest].source.tolist(), pairs[largest].destination.tolist())
    rows.append(reference(f"plain copy {'between cards' if between else 'on the device'}", times["copy"], nbytes))
    share, slower = (None, None) if between else (0.85, 1.05)
    unchecked = bandwidth_share(f"{where}, scattered 32 KiB blocks", times["plain"], rows[0], share, nbytes)
    rows.append(unchecked)
    rows.append(bandwidth_share(f"{where}, the same, sums verified", times["checked"], rows[0], share, nbytes))
    rows.append(time_ratio(f"{where}, sums verified, against without", times["checked"], unchecked, slower, nbytes))
    limits_s = {128: 150e-6, 1: 30e-6} if not between else {}
    for count in (128, 64, 8, 1):
        limit_s = limits_s.get(count)
        small = interleaved(
            {"plain": lambda n=count: plain.read(pairs[n]), "checked": lambda n=count: checked.read(pairs[n])},  # type: ignore[misc]
            20 * repeats, 20,
        )  # fmt: skip
        require_moved(cache, pairs[count].source.tolist(), pairs[count].destination.tolist())
        for way, name in (("plain", ""), ("checked", ", sums verified")):
            title, size = f"{where}, {count} block(s) x {LAYERS} layers, wall{name}", count * BLOCK_NBYTES
            timed = small[way]
            rows.append(within(title, timed, limit_s, size) if limit_s else reference(title, timed, size))
    return rows


def _conversions(
    stack: ExitStack, plain: Reader, there: dict[str, Any], blocks: int, largest: int, repeats: int
) -> list[Row]:
    other = build("cuda", layers=LAYERS, blocks=blocks // 4, tokens=4 * TOKENS, layout="LBNHC")
    stack.callback(other.close)
    readers = {"convert": Reader(other, there, verify=False), "checked": Reader(other, there)}
    for reader in readers.values():
        stack.callback(reader.transport.close)
    units = blocks // 4 * 4
    pairs = BlockColumns(scattered(blocks, largest, 3), scattered(units, largest, 4))
    nbytes = largest * BLOCK_NBYTES
    times = interleaved(
        {
            "plain": lambda: plain.read(pairs),
            "convert": lambda: readers["convert"].read(pairs),
            "checked": lambda: readers["checked"].read(pairs),
        },
        repeats,
    )
    require_moved(other, pairs.source.tolist(), pairs.destination.tolist())
    base = reference("ipc, as it is (for conversions)", times["plain"], nbytes)
    return [
        base,
        time_ratio("16 -> 64 tokens, HNC -> NHC", times["convert"], base, 1.1, nbytes),
        time_ratio("16 -> 64 tokens, HNC -> NHC, sums verified", times["checked"], base, None, nbytes),
    ]


def _beside_decoding(cache: GrowableKVCache, there: dict[str, Any], largest: int) -> Iterator[Row]:
    for name in STEPS:
        yield from _beside_step(name, cache, there, largest)
        torch.cuda.empty_cache()


def _beside_step(name: str, cache: GrowableKVCache, there: dict[str, Any], largest: int) -> Iterator[Row]:
    """Captured steps, whose kernels leave no pause between them: what `_transfer_engine` measures, at its worst."""
    decoding = Decoding(name)
    pairs = BlockColumns(*(scattered(cache.num_committed_blocks, largest, seed) for seed in (5, 6)))
    nbytes = largest * BLOCK_NBYTES
    for programs in SWEEP:
        reader = Reader(cache, there, is_decoding=lambda: True, programs=programs)
        try:
            alone = interleaved({"step": decoding.step}, NUM_STEPS // 3, 10)["step"]
            seconds = _transfers_beside_steps(decoding, reader, pairs)
            # Also a step that many of its kernels have to wait in must not outlast them.
            depth = 1 + ceil(12 * statistics.median(alone) / min(seconds))
            busy = _steps_beside_transfers(decoding, reader, pairs, depth)
        finally:
            reader.transport.close()
        base = reference(f"{name}, a decode step alone ({programs})", alone)
        yield base
        yield time_ratio(f"{name}, a step beside a transfer of {programs} programs", busy, base, None)
        yield reference(f"{name}, that transfer of {programs} programs", seconds, nbytes)


def _steps_beside_transfers(decoding: Decoding, reader: Reader, pairs: BlockColumns, depth: int) -> list[float]:
    """The mean time of steps during all of which a transfer ran; `depth` are posted, and run one after the other.

    Not the median: where few kernels of a step have to wait until a copy leaves their place, it would not show them.
    """
    times: list[float] = []
    running: deque[Transfer] = deque()
    for _ in range(NUM_STEPS):
        while len(running) < depth:
            running.append(reader.transport.read(reader.peer, pairs))
        began = time.perf_counter()
        decoding.step()
        ended = time.perf_counter()
        if running[-1].poll() == "running":
            times.append(ended - began)
        while running and running[0].poll() != "running":
            _require_done(running.popleft())
    for transfer in running:
        transfer.wait(TIMEOUT_S)
        _require_done(transfer)
    if len(times) < NUM_STEPS // 2:
        raise SystemExit(f"transfer: {NUM_STEPS - len(times)} of {NUM_STEPS} steps outlasted {depth} transfers")
    return [statistics.fmean(times)]


def _transfers_beside_steps(decoding: Decoding, reader: Reader, pairs: BlockColumns) -> list[float]:
    """Times of transfers during all of which steps ran; nobody waits for a step, so that the end is seen at once."""
    seconds = []
    for _ in range(5):
        transfer, posted = reader.transport.read(reader.peer, pairs), time.perf_counter()
        decoding.graph.replay()
        while transfer.poll() == "running":
            if torch.cuda.current_stream().query():
                decoding.graph.replay()
        seconds.append(time.perf_counter() - posted)
        _require_done(transfer)
        torch.cuda.synchronize()
    return seconds


def _require_done(transfer: Transfer) -> None:
    if transfer.poll() != "done":
        raise SystemExit(f"transfer: {transfer.reason}")
