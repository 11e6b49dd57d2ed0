"""How long a large KV cache takes to sleep and to wake on a CUDA device, its NIXL registration included.

    python benchmarks/gpu_sleep.py [--gib 64] [--segments 32] [--repeats 5]

Sleeping is: deregister, destroy the agent, release. Waking is: commit, zero, register by the next agent, which was
built in the background meanwhile; that takes seconds, is measured by itself, and delays only a wake that comes sooner.
Prints one JSON object a line and appends them to the file that `PDKV_GPU_RECORDS` names. Exits with 1 if a limit is
missed.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from _gpu_bench import GIB, Bench

from pdkv import lifecycle
from pdkv.kvcache import GrowableKVCache

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


def measure(bench: Bench, cache: GrowableKVCache, connector: NixlConnector) -> None:
    """Sleep and wake so many times, the next agent built in between."""
    sleeps, wakes, parts, freed = [], [], [], []
    for _ in range(bench.repeats):
        before = cache.driver.memory_info().free
        reports: list[Any] = []
        sleeps.append(milliseconds(lambda reports=reports: reports.append(lifecycle.sleep(cache, connector))))
        freed.append(cache.driver.memory_info().free - before)
        connector.build_next()
        connector.wait_for_next()
        wakes.append(milliseconds(lambda reports=reports: reports.append(lifecycle.wake(cache, connector))))
        parts.append({**dict(reports[0].times_s), **dict(reports[1].times_s)})
    steps_ms = {name: round(statistics.median(part[name] for part in parts) * 1e3, 3) for name in parts[0]}
    shape = {"gib": bench.nbytes / GIB, "segments": bench.segments}
    for what, values, limit, more in (
        ("sleep with registration", sleeps, LIMIT_MS, {"steps_ms": steps_ms, "bytes_freed": min(freed)}),
        ("wake with registration", wakes, LIMIT_MS, {"steps_ms": steps_ms}),
        ("build an agent, in the background", [1e3 * seconds for seconds in connector.build_s], None, {}),
    ):
        bench.row(what, statistics.median(values), "ms", limit, max=round(max(values), 3), **more, **shape)


def main() -> int:
    bench = Bench.from_command_line(__doc__, "sleep")
    with bench.cache() as cache:
        cache.commit(bench.blocks, defragment=True)
        connector = NixlConnector()
        connector.register_kv_cache(cache)
        measure(bench, cache, connector)
        connector.unregister_kv_cache()
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
