"""How long runs of neighbouring blocks are in engines that have served for an hour: vLLM's own block pool, simulated.

    python benchmarks/block_runs.py [--quick] [--json FILE]

A prefill and a decode engine serve the same requests. Both take their blocks from `vllm.v1.core.block_pool.BlockPool`,
as vLLM does: P a prompt's at once and lets go of them when D has them, D a prompt's at once, then one for every 16
tokens that it says, and lets go of all, the last one first. Blocks that follow each other on both sides move by one
descriptor a layer, in whichever direction they follow each other. Load and lengths are drawn at random; time is
simulated.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
from _report import add_report_options, headline, table, write_json

from pdkv.arguments import COUNT, MINUTES, NATURAL

BLOCK_TOKENS = 16
TOKENS_PER_S = 30.0  # of one request while it decodes
TRANSFER_S = 0.05
PREFILL_TOKENS_PER_S = 20_000.0
HEADINGS = ("pool", "minutes", "requests", "blocks", "descriptors a layer", "blocks in a run", "median", "busy")


@dataclass(frozen=True)
class Load:
    """Requests a second, and tokens by median and sigma of a lognormal distribution."""

    per_s: float = 6.0
    prompt: tuple[float, float] = (900.0, 0.9)
    answer: tuple[float, float] = (220.0, 0.8)
    longest: int = 8000


@dataclass
class Window:
    """What transfers looked like in one stretch of time."""

    blocks: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def row(self, pool: str, minutes: str) -> dict[str, Any]:
        """One line of the table."""
        lengths = [blocks / runs for blocks, runs in zip(self.blocks, self.runs, strict=True)]
        return {
            "pool": pool,
            "minutes": minutes,
            "requests": len(self.blocks),
            "blocks": sum(self.blocks),
            "descriptors_per_layer": sum(self.runs),
            "blocks_per_run": sum(self.blocks) / sum(self.runs),
            "median_blocks_per_run": statistics.median(lengths),
            "busy": statistics.fmean(self.busy),
        }


class Engine:
    """A pool, and the blocks of each request."""

    def __init__(self, num_blocks: int, caching: bool) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool = BlockPool(num_blocks, enable_caching=caching, hash_block_size=BLOCK_TOKENS)
        self.caching = caching
        self._blocks: dict[int, list[Any]] = {}
        self._hashes = count()

    def take(self, request: int, num_blocks: int) -> list[int] | None:
        """Blocks for a request; None where there are not so many."""
        if num_blocks > self.pool.get_num_free_blocks():
            return None
        taken = self.pool.get_new_blocks(num_blocks)
        self._blocks.setdefault(request, []).extend(taken)
        return [block.block_id for block in taken]

    def let_go(self, request: int) -> None:
        """In the order of vLLM's manager. Full blocks stay findable where prefixes are cached, and go to the end."""
        blocks = self._blocks.pop(request)
        if self.caching:
            hashes = [next(self._hashes).to_bytes(32, "little") for _ in blocks]
            full = len(blocks) - 1  # the last one is not
            self.pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, full, BLOCK_TOKENS, 0)
        self.pool.free_blocks(reversed(blocks))

    @property
    def busy(self) -> float:
        """Share of the pool in use."""
        return 1 - self.pool.get_num_free_blocks() / self.pool.num_gpu_blocks


def simulate(caching: bool, minutes: float, num_blocks: int, load: Load, seed: int) -> list[dict[str, Any]]:
    """Serve; rows for the first tenth of the time and the last."""
    random = np.random.default_rng(seed)
    prefill, decode = Engine(num_blocks // 4, caching), Engine(num_blocks, caching)
    windows = {"first": Window(), "last": Window()}
    events: list[tuple[float, int, str, int, int]] = []
    numbers, order, now, end = count(), count(), 0.0, minutes * 60

    def later(seconds: float, what: str, request: int, left: int) -> None:
        heapq.heappush(events, (now + seconds, next(order), what, request, left))

    def blocks_of(length: tuple[float, float]) -> int:
        tokens = min(load.longest, max(1, random.lognormal(np.log(length[0]), length[1])))
        return int(-(-tokens // BLOCK_TOKENS))

    later(0.0, "arrive", next(numbers), 0)
    waiting: dict[int, tuple[int, list[int]]] = {}
    while events and now < end:
        now, _, what, request, left = heapq.heappop(events)
        if what == "arrive":
            later(random.exponential(1 / load.per_s), "arrive", next(numbers), 0)
            later(0.0, "prefill", request, blocks_of(load.prompt))
        elif what == "prefill":
            taken = prefill.take(request, left)
            if taken is None:
                later(0.1, "prefill", request, left)
            else:
                waiting[request] = (left, taken)
                later(left * BLOCK_TOKENS / PREFILL_TOKENS_PER_S, "load", request, left)
        elif what == "load":
            wanted = decode.take(request, left)
            if wanted is None:
                later(0.1, "load", request, left)
                continue
            window = windows.get("first" if now < end / 10 else "last" if now > end * 0.9 else "")
            if window is not None:
                window.blocks.append(left)
                window.runs.append(joint_runs(waiting[request][1], wanted))
                window.busy.append(decode.busy)
            later(TRANSFER_S, "loaded", request, left)
        elif what == "loaded":
            del waiting[request]
            prefill.let_go(request)
            later(BLOCK_TOKENS / TOKENS_PER_S, "say", request, blocks_of(load.answer))
        elif what == "say":
            if left and decode.take(request, 1) is not None:
                later(BLOCK_TOKENS / TOKENS_PER_S, "say", request, left - 1)
            else:
                decode.let_go(request)
    name = "prefixes cached" if caching else "no prefixes cached"
    tenth = f"{minutes / 10:g}"
    return [windows["first"].row(name, f"first {tenth}"), windows["last"].row(name, f"last {tenth}")]


def joint_runs(source: Sequence[int], destination: Sequence[int]) -> int:
    """Runs of pairs that follow each other on both sides: what `pdkv.transfer.runs` makes of them, for one layer."""
    pairs = np.array(sorted(zip(destination, source, strict=True)))
    return 1 + int(np.any(np.diff(pairs, axis=0) != 1, axis=1).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_options(parser)
    parser.add_argument("--minutes", type=MINUTES, help="simulated time (default 60, quick: 6)")
    parser.add_argument("--blocks", type=COUNT, default=12_288, help="decode's pool (default 12288); P has a quarter")
    parser.add_argument("--seed", type=NATURAL, default=1)
    arguments = parser.parse_args()
    minutes = arguments.minutes or (6.0 if arguments.quick else 60.0)
    rows = [
        row for caching in (True, False) for row in simulate(caching, minutes, arguments.blocks, Load(), arguments.seed)
    ]
    if arguments.json:
        write_json(arguments.json, "block_runs", {"minutes": minutes, "blocks": arguments.blocks}, {}, rows)
    print(headline("Runs of neighbouring blocks in vLLM's block pool"))
    cells = [
        [
            row["pool"], row["minutes"], str(row["requests"]), str(row["blocks"]), str(row["descriptors_per_layer"]),
            f"{row['blocks_per_run']:.3g}", f"{row['median_blocks_per_run']:.3g}", f"{row['busy']:.0%}",
        ]
        for row in rows
    ]  # fmt: skip
    print(table(HEADINGS, cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
