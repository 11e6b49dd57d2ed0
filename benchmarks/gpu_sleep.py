"""How long a large KV cache takes to sleep and to wake on a CUDA device, its NIXL registration included.

    python benchmarks/gpu_sleep.py [--gib 64] [--segments 32] [--repeats 5]

Sleeping is: deregister, destroy the agent, release. Waking is: commit, zero, register by the next agent, which was
built in the background meanwhile; that takes seconds, is measured by itself, and delays only a wake that comes sooner.
Prints one JSON object a line and appends them to the file that `PDKV_GPU_RECORDS` names. Exits with 1 if a limit is
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from pdkv import lifecycle
from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig
from pdkv.memory import open_driver

GIB, MIB = 1 << 30, 1 << 20
PAGE = 64 << 10
#: What must be reached, each way, for 64 GiB with registration.
LIMIT_MS = 120.0


class NixlConnector:
    """Registers extents with an agent of its own; a new agent for each registration, as in pdkv's vLLM connectors."""

    registers_memory = True

    def __init__(self) -> None:
        self.numbers = iter(range(1_000_000))
        self.build_s: list[float] = []
        self._agent: Any = None
        self._next: Any = None
        self._handles: list[Any] = []
        self._build()
        self._thread = threading.Thread(target=lambda: None)
        self._thread.start()

    def _build(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        torch.cuda.set_device(0)
        start = time.perf_counter()
        agent = nixl_agent(f"sleeper{next(self.numbers)}", nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend("UCX", {"engine_config": "RCACHE_ENABLE=n,TLS=^cuda_ipc"})
        self.build_s.append(time.perf_counter() - start)
        self._next = agent

    def build_next(self) -> None:
        """In a thread of its own."""
        self._thread = threading.Thread(target=self._build)
        self._thread.start()

    def wait_for_next(self) -> None:
        self._thread.join(60)

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        self.wait_for_next()
        self._agent, self._next = self._next, None
        for extent in cache.extents():
            entry = [(extent.address, extent.nbytes, extent.device_id, "")]
            self._handles.append(self._agent.register_memory(entry, mem_type="VRAM"))
        self._agent.get_agent_metadata()

    def unregister_kv_cache(self) -> None:
        if self._agent is None:
            return
        for handle in self._handles:
            self._agent.deregister_memory(handle)
        self._handles.clear()
        del self._agent.agent  # the native agent, at once
        self._agent = None

    def refuse_transfers(self) -> None: ...

    def resume_transfers(self) -> None: ...

    def holders(self) -> tuple[str, ...]:
        return ()

    def abort_transfers(self, reason: str) -> None: ...

    def withdraw(self) -> None: ...

    def publish(self, generation: int) -> None: ...


def milliseconds(work: Callable[[], Any]) -> float:
    """Wall time of `work`, device work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(cache: GrowableKVCache, connector: NixlConnector, repeats: int) -> list[dict[str, Any]]:
    """Sleep and wake so many times, the next agent built in between."""
    sleeps, wakes, parts, freed = [], [], [], []
    for _ in range(repeats):
        before = cache.driver.memory_info().free
        reports: list[Any] = []
        sleeps.append(milliseconds(lambda reports=reports: reports.append(lifecycle.sleep(cache, connector))))
        freed.append(cache.driver.memory_info().free - before)
        connector.build_next()
        connector.wait_for_next()
        wakes.append(milliseconds(lambda reports=reports: reports.append(lifecycle.wake(cache, connector))))
        parts.append({**dict(reports[0].times_s), **dict(reports[1].times_s)})
    middle = {name: round(statistics.median(part[name] for part in parts) * 1e3, 3) for name in parts[0]}
    return [
        row("sleep with registration", sleeps, LIMIT_MS, steps_ms=middle, bytes_freed=min(freed)),
        row("wake with registration", wakes, LIMIT_MS, steps_ms=middle),
        row("build an agent, in the background", [1e3 * seconds for seconds in connector.build_s], None),
    ]


def row(what: str, values: list[float], limit: float | None, **more: Any) -> dict[str, Any]:
    value = statistics.median(values)
    ok = limit is None or value <= limit
    return {
        "table": "sleep", "what": what, "value": round(value, 3), "unit": "ms", "max": round(max(values), 3),
        "limit": limit, "ok": ok, **more,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=64.0)
    parser.add_argument("--segments", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    driver = open_driver("cuda")
    spec = AttentionSpec(num_kv_heads=8, block_size=16, head_size=128, dtype="bfloat16")
    blocks = int(arguments.gib * GIB) // arguments.segments // PAGE
    config = KVCacheConfig.uniform([f"layer{index}" for index in range(arguments.segments)], spec, blocks)
    with GrowableKVCache(config, driver) as cache:
        cache.commit(blocks, defragment=True)
        connector = NixlConnector()
        connector.register_kv_cache(cache)
        rows = measure(cache, connector, arguments.repeats)
        connector.unregister_kv_cache()
    driver.close()
    for entry in rows:
        line = json.dumps({**entry, "gib": arguments.gib, "segments": arguments.segments})
        print(line, flush=True)
        if path := os.environ.get("PDKV_GPU_RECORDS"):
            with open(path, "a") as file:
                print(line, file=file)
    return 0 if all(entry["ok"] for entry in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
