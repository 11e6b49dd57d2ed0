"""What the growable cache costs on the host, beside what it replaces, in one run.

    python benchmarks/core.py [--quick] [--json FILE] [--png FILE]

Each repeat does the whole life of a KV cache twice, in turn:

- *plain*: one ``torch.zeros`` for the pool, its storage registered with a real NIXL agent in one piece, as vLLM on the
  CPU does it;
- *pdkv*: reserve, commit, a second time in two halves, defragment, register the extents, release, recommit.

Both take and zero all their pages where they allocate: ``torch.zeros`` writes its zeros, and a commit populates. The
ratios are medians over repeats of pdkv / plain.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

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

from pdkv.arguments import COUNT

TIB = 1 << 40
NOOP_CALLS = 200
#: What a result is compared with: a key of the plain side.
COUNTERPART = {
    "commit all at once": "zeros",
    "defragment": "zeros",
    "recommit": "zeros",
    "release": "free",
    "register": "register",
    "register again": "register again",
    "deregister": "deregister",
    "import pdkv": "import torch",
}
#: Upper bounds in seconds that the project promises (best of the repeats).
TARGETS = {"commit, nothing to remap": 50e-6, "import pdkv": 0.1, "reserve 1 TiB": 1e-3}

Times = defaultdict[str, Samples]


@dataclass(frozen=True)
class Size:
    """The cache of the benchmark: `layers` segments of `blocks` blocks of `page_bytes` bytes."""

    layers: int
    blocks: int
    page_bytes: int = 32 << 10  # 8 KV heads, 16 tokens, K and V of 64, bfloat16

    @property
    def nbytes(self) -> int:
        return self.layers * self.blocks * self.page_bytes


def build_config(size: Size, blocks: int) -> Any:
    """A config with room for `blocks` blocks a layer."""
    from pdkv import AttentionSpec, KVCacheConfig

    spec = AttentionSpec(num_kv_heads=8, block_size=16, head_size=64, dtype="bfloat16")
    return KVCacheConfig.uniform([f"layer{index}" for index in range(size.layers)], spec, blocks)


def register(agent: Any, ranges: list[tuple[int, int]], times: Times) -> None:
    """Register, forget and register again: the first time of an address costs more than later ones."""
    entries = [(address, nbytes, 0, "") for address, nbytes in ranges]
    handle = times["register"].time(lambda: agent.register_memory(entries, mem_type="DRAM"))
    times["deregister"].time(lambda: agent.deregister_memory(handle))
    handle = times["register again"].time(lambda: agent.register_memory(entries, mem_type="DRAM"))
    agent.deregister_memory(handle)


def run_plain(size: Size, agent: Any, times: Times) -> None:
    """One life of a pool as engines have it."""
    import torch

    pool = [times["zeros"].time(lambda: torch.zeros(size.nbytes, dtype=torch.int8))]
    storage = pool[0].untyped_storage()
    register(agent, [(storage.data_ptr(), storage.nbytes())], times)
    del storage
    times["free"].time(pool.clear)


def run_pdkv(size: Size, agent: Any, driver: Any, times: Times) -> None:
    """One life of a growable cache."""
    from pdkv import GrowableKVCache

    config = build_config(size, size.blocks)
    with GrowableKVCache(config, driver) as cache:
        times["commit all at once"].time(lambda: cache.commit(size.blocks))
    cache = times["reserve the same"].time(lambda: GrowableKVCache(config, driver))
    times["commit a half"].time(lambda: cache.commit(size.blocks // 2))
    times["grow by the other half"].time(lambda: cache.commit(size.blocks))
    times["defragment"].time(lambda: cache.commit(size.blocks, defragment=True))
    times["commit, nothing to remap"].values.append(noop_seconds(cache, size))
    extents = times["extents"].time(cache.extents)
    times["committed views"].time(cache.committed_views)
    register(agent, [(extent.address, extent.nbytes) for extent in extents], times)
    times["release"].time(cache.release_physical)
    times["recommit"].time(cache.recommit)
    times["close"].time(cache.close)


def noop_seconds(cache: Any, size: Size) -> float:
    """Seconds of one ``commit(n, defragment=True)`` that finds one chunk per segment already."""
    calls = Samples()
    calls.time(lambda: [cache.commit(size.blocks, defragment=True) for _ in range(NOOP_CALLS)])
    return calls.best / NOOP_CALLS


def run_reserve(size: Size, driver: Any, times: Times) -> None:
    """Address space for 1 TiB, nothing committed."""
    from pdkv import GrowableKVCache

    config = build_config(size, TIB // size.page_bytes // size.layers)
    times["config of 1 TiB"].time(lambda: config.padded(driver.granule).segments)
    cache = times["reserve 1 TiB"].time(lambda: GrowableKVCache(config, driver))
    times["views over 1 TiB"].time(cache.views)
    cache.close()


def import_seconds(module: str) -> float:
    """Seconds that a fresh interpreter takes to import `module`; pdkv must not bring torch along."""
    code = (
        "import json, sys, time; began = time.perf_counter(); "
        f"import {module}; took = time.perf_counter() - began; "
        "print(json.dumps([took, 'torch' in sys.modules]))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    took, with_torch = json.loads(output.stdout)
    if with_torch and module != "torch":
        raise SystemExit(f"error: `import {module}` imports torch, which it must not")
    return float(took)


def measure(size: Size, repeats: int) -> tuple[Times, Times]:
    """All times of the plain side and of pdkv's, one value per repeat; a round before the first warms up."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # read when it is imported
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    from pdkv import open_driver

    agent = nixl_agent("benchmark", nixl_agent_config(enable_prog_thread=False))
    driver = open_driver("host")
    plain: Times = defaultdict(Samples)
    pdkv: Times = defaultdict(Samples)
    for repeat in range(-1, repeats):
        if repeat == 0:
            plain.clear()
            pdkv.clear()
        run_plain(size, agent, plain)
        run_pdkv(size, agent, driver, pdkv)
        run_reserve(size, driver, pdkv)
        plain["import torch"].values.append(import_seconds("torch"))
        pdkv["import pdkv"].values.append(import_seconds("pdkv"))
    return plain, pdkv


def rows(plain: Times, pdkv: Times) -> list[list[str]]:
    """The printed table."""
    lines = [["plain: " + name, format_time(s.best), format_time(s.median), "", ""] for name, s in plain.items()]
    for name, samples in pdkv.items():
        ratio = ratio_of(name, plain, pdkv)
        target = TARGETS.get(name)
        verdict = "" if target is None else f"< {format_time(target)}: {'yes' if samples.best < target else 'NO'}"
        times = [format_time(samples.best), format_time(samples.median)]
        lines.append(["pdkv: " + name, *times, "" if ratio is None else format_ratio(ratio), verdict])
    return lines


def ratio_of(name: str, plain: Times, pdkv: Times) -> float | None:
    """pdkv / plain, where there is something to compare with."""
    counterpart = COUNTERPART.get(name)
    return None if counterpart is None else paired_ratio(pdkv[name].values, plain[counterpart].values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_options(parser)
    parser.add_argument("--layers", type=COUNT, default=32)
    parser.add_argument("--blocks", type=COUNT, help="blocks of 32 KiB a layer (default: 1024, with --quick 128)")
    parser.add_argument("--repeats", type=COUNT, help="(default: 7, with --quick 2)")
    arguments = parser.parse_args()
    size = Size(arguments.layers, arguments.blocks or (128 if arguments.quick else 1024))
    repeats = arguments.repeats or (2 if arguments.quick else 7)

    print(headline(f"core: {size.layers} layers of {size.blocks} blocks, {format_nbytes(size.nbytes)}, host memory"))
    plain, pdkv = measure(size, repeats)
    print(table(["", "best", "median", "pdkv / plain", "target"], rows(plain, pdkv)))
    ratios = {name: ratio for name in pdkv if (ratio := ratio_of(name, plain, pdkv)) is not None}
    if arguments.json:
        settings = {"size": size, "nbytes": size.nbytes, "repeats": repeats, "unit": "s", "quick": arguments.quick}
        met = {name: {"limit": limit, "met": pdkv[name].best < limit} for name, limit in TARGETS.items()}
        results = {"plain": dict(plain), "pdkv": dict(pdkv), "ratios": ratios, "targets": met}
        write_json(arguments.json, "core", settings, results)
    if arguments.png:
        panels = {
            f"{name} (ms)": {"plain": plain[COUNTERPART[name]].median * 1e3, "pdkv": pdkv[name].median * 1e3}
            for name in ratios
        }
        draw_bars(arguments.png, f"{format_nbytes(size.nbytes)} of host memory, medians of {repeats}", panels)


if __name__ == "__main__":
    main()
