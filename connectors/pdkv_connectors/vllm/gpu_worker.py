"""vLLM's CUDA worker with a growable KV cache in CUDA virtual memory."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

import pdkv
from pdkv.errors import ConnectorError
from pdkv.kvcache.sizing import MemoryReading, transient_peak
from pdkv_connectors.nixl import probe
from pdkv_connectors.vllm import rebind
from pdkv_connectors.vllm.growth import GrowableWorker

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv.memory import MemoryDriver

logger = init_logger(f"vllm.{__name__}")

#: Below this a read within one host is emulated: over tcp 0.2 to 0.5 GB/s were measured, mapped 84 and more.
SLOW_GB_PER_S = 5.0


class GrowableGPUWorker(GrowableWorker, Worker):
    """Stock CUDA worker with model runner V1 or V2; memory from the CUDA driver."""

    platform = "cuda"

    def init_device(self) -> None:
        """`PDKV_ENGINE_MEMORY` in bytes becomes the share of the card by which the stock worker computes."""
        if self.settings.engine_memory is not None:
            total = torch.cuda.get_device_properties(self.local_rank).total_memory
            self.cache_config.gpu_memory_utilization = min(1.0, self.settings.engine_memory / total)
        super().init_device()

    def open_driver(self) -> MemoryDriver:
        return pdkv.open_driver("cuda", device=self.device.index)

    @property
    def real_warmup_first(self) -> bool:
        """Before graph capture with model runner V2, whose workspaces must not grow after it.

        With V1 after it: a decode step before the capture would try to capture on the default stream.
        """
        return bool(self.use_v2_model_runner)

    def begin_measuring(self) -> None:
        # Stock warmup takes block ids up to this count (a copy that is private to the worker): keep it on the prefix.
        self.model_runner.kv_cache_config.num_blocks = self._require_cache().num_committed_blocks
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def read_memory(self, driver: MemoryDriver, committed_bytes: int) -> MemoryReading:
        torch.cuda.synchronize(self.device)
        gc.collect()
        peak = torch.cuda.max_memory_allocated(self.device)
        resident = torch.cuda.memory_allocated(self.device)
        # What torch only keeps for later is given back on demand and must not count as used.
        torch.cuda.empty_cache()
        return MemoryReading(
            init_free_memory=self.init_snapshot.free_memory,
            free_memory=driver.memory_info().free,
            requested_memory=int(self.requested_memory),
            transient_peak_bytes=transient_peak(
                profiled_activation_bytes=int(getattr(self, "peak_activation_memory", 0)),
                warmup_allocated_peak_bytes=peak,
                resident_allocated_bytes=resident,
            ),
        )

    def check_bandwidth(self, cache: GrowableKVCache, agent: Any) -> None:
        """Read from registered memory as a peer on this host would, and say loudly if that is emulated.

        The UCX in NIXL's wheel can map CUDA virtual memory of another process by FABRIC handles only. Without them it
        copies through tcp by software: right, and some two hundred times slower. Skipped by `PDKV_PROBE=0`.
        """
        if not self.settings.probe:
            return
        first = cache.extents()[0]
        try:
            report = probe.measure_read(agent, first.address, first.nbytes, memory="VRAM", device_id=first.device_id)
        except ConnectorError as error:
            logger.warning("pdkv: how fast peers on this host read the KV cache is not known: %s", error)
            return
        self.probe_gb_per_s = report.gb_per_s
        text = f"pdkv: a peer on this host reads the KV cache at {report.gb_per_s:.2f} GB/s over NIXL"
        if report.gb_per_s >= SLOW_GB_PER_S:
            logger.info("%s.", text)
            return
        logger.warning(
            "%s: SOFTWARE EMULATION. This UCX cannot map CUDA virtual memory with %s handles; use a host with FABRIC "
            "handles, or a NIXL built with a UCX that can, or expect slow transfers.",
            text,
            cache.driver.describe().get("handle_type", "these"),
        )

    def rebind(self, config: Any, views: dict[str, torch.Tensor]) -> None:
        (rebind.rebind_v2 if self.use_v2_model_runner else rebind.rebind_v1)(self.model_runner, config, views)
