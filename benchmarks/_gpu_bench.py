"""What the benchmarks of one GPU's memory share: a cache of a given shape, rows with limits, and how they end."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from _report import keep_record

from pdkv.arguments import COUNT, POSITIVE
from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig
from pdkv.memory import open_driver

GIB, MIB = 1 << 30, 1 << 20
PAGE = 64 << 10


class Bench:
    """One device, one shape of cache, and what was missed so far.

    Args:
        table: the name that `gpu_all.py` prints before the rows.
    """

    def __init__(self, table: str, gib: float, segments: int, repeats: int) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.table = table
        self.repeats = repeats
        self.segments = segments
        self.nbytes = int(gib * GIB)
        self.driver = open_driver("cuda")
        spec = AttentionSpec(num_kv_heads=8, block_size=16, head_size=128, dtype="bfloat16")
        self.blocks = self.nbytes // segments // PAGE
        self.config = KVCacheConfig.uniform([f"layer{index}" for index in range(segments)], spec, self.blocks)
        self.missed: list[str] = []

    @classmethod
    def from_command_line(cls, doc: str | None, table: str) -> Bench:
        """As ``--gib``, ``--segments`` and ``--repeats`` say."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--gib", type=POSITIVE, default=64.0)
        parser.add_argument("--segments", type=COUNT, default=32)
        parser.add_argument("--repeats", type=COUNT, default=5)
        return cls(table, **vars(parser.parse_args()))

    def cache(self) -> GrowableKVCache:
        """A new cache, nothing committed."""
        return GrowableKVCache(self.config, self.driver)

    def row(self, what: str, value: float, unit: str, limit: float | None = None, **more: Any) -> None:
        """Keep one result. It must not exceed `limit`."""
        ok = limit is None or value <= limit
        if not ok:
            self.missed.append(what)
        row = {"table": self.table, "what": what, "value": round(value, 4), "unit": unit, "limit": limit, "ok": ok}
        print(json.dumps({**row, **more}), flush=True)
        keep_record({**row, **more})

    def end(self) -> int:
        """Close the driver; the program's exit code."""
        self.driver.close()
        if self.missed:
            print(f"missed: {', '.join(self.missed)}", file=sys.stderr)
        return 1 if self.missed else 0
