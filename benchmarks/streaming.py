"""From how many bytes on a copy by the host's kernels had better write past the caches.

    python benchmarks/streaming.py [--quick] [--json FILE] [--png FILE]

Blocks of 32 KiB, scattered over 256 MiB, are copied to as many others by one call, through the caches and past them in
turn, and what was written is read right afterwards, as decode does: what a copy gains must not be lost there. Ratios
are medians over pairs. `pdkv_connectors.native.STREAM_NBYTES` is where the ratio with the read becomes less than 1.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import numpy.typing as npt
from _report import (
    Samples,
    add_report_options,
    draw_bars,
    format_nbytes,
    format_ratio,
    format_time,
    headline,
    paired_ratio,
    table,
    write_json,
)

from pdkv_connectors.native import STREAM_NBYTES, Kernels

BLOCK_NBYTES = 32 << 10
MEMORY_NBYTES = 256 << 20  # on either side
SIZES = tuple(1 << power for power in range(18, 27))


class Memory:
    """Two ranges of blocks, and random places in them."""

    def __init__(self) -> None:
        self.source = np.ones((MEMORY_NBYTES // BLOCK_NBYTES, BLOCK_NBYTES // 8), np.int64)
        self.destination = np.zeros_like(self.source)
        self._kernels = Kernels()
        self._random = np.random.default_rng(1)

    def places(self, blocks: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Numbers of blocks to copy from and to."""
        source, destination = (self._random.permutation(len(self.source))[:blocks].astype(np.int64) for _ in range(2))
        return source, destination

    def time(self, blocks: int, *, streams: bool) -> tuple[float, float]:
        """Seconds of a copy, and of it with a read of what it has written."""
        source, destination = self.places(blocks)
        from_, to = (
            memory.ctypes.data + BLOCK_NBYTES * numbers
            for memory, numbers in ((self.source, source), (self.destination, destination))
        )
        sizes, copy, read = np.full(blocks, BLOCK_NBYTES, np.int64), Samples(), Samples()
        copy.time(lambda: self._kernels.copy_runs(to, from_, sizes, streams=streams))
        found = read.time(lambda: sum(int(self.destination[number].sum()) for number in destination.tolist()))
        if found != blocks * self.source.shape[1]:
            raise SystemExit("streaming: a copy is wrong")
        self.destination[destination] = 0
        return copy.values[0], copy.values[0] + read.values[0]


def measure(memory: Memory, nbytes: int, repeats: int) -> dict[str, Samples]:
    """Seconds by what was timed; the first of each pair alternates."""
    found = {name: Samples() for name in ("cached", "streamed", "cached, then read", "streamed, then read")}
    for number in range(repeats):
        for name in ("cached", "streamed") if number % 2 else ("streamed", "cached"):
            copied, read = memory.time(nbytes // BLOCK_NBYTES, streams=name == "streamed")
            found[name].values.append(copied)
            found[f"{name}, then read"].values.append(read)
    return found


def ratios(found: dict[str, Samples]) -> tuple[float, float]:
    """Streamed over cached: of the copy alone, and with the read."""
    alone = paired_ratio(found["streamed"].values, found["cached"].values)
    return alone, paired_ratio(found["streamed, then read"].values, found["cached, then read"].values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_options(parser)
    arguments = parser.parse_args()
    sizes, repeats = (SIZES[:5:2], 4) if arguments.quick else (SIZES, 60)
    print(
        headline(f"streaming: blocks of {format_nbytes(BLOCK_NBYTES)}; from {format_nbytes(STREAM_NBYTES)} on streamed")
    )
    memory = Memory()
    found = {nbytes: measure(memory, nbytes, repeats) for nbytes in sizes}
    rows = [
        [
            format_nbytes(nbytes),
            *(format_time(samples.median) for samples in times.values()),
            *map(format_ratio, ratios(times)),
        ]
        for nbytes, times in found.items()
    ]
    names = ["cached", "streamed", "cached, then read", "streamed, then read"]
    print(table(["bytes", *names, "streamed / cached", "then read"], rows))
    if arguments.json:
        results = {
            format_nbytes(nbytes): {**times, "ratio": ratios(times)[0], "ratio then read": ratios(times)[1]}
            for nbytes, times in found.items()
        }
        write_json(arguments.json, "streaming", {"repeats": repeats, "unit": "s", "quick": arguments.quick}, results)
    if arguments.png:
        panels = {"streamed / cached": {format_nbytes(nbytes): ratios(times)[1] for nbytes, times in found.items()}}
        draw_bars(arguments.png, "A copy of blocks of 32 KiB, and a read of what was written", panels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
