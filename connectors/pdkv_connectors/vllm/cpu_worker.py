"""vLLM's CPU worker with a growable KV cache in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info
from vllm.v1.worker.cpu_worker import CPUWorker

import pdkv
from pdkv_connectors.vllm import measure, rebind
from pdkv_connectors.vllm.growth import GrowableWorker
from pdkv_connectors.vllm.settings import EngineSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pdkv.kvcache.sizing import MemoryReading
    from pdkv.memory import MemoryDriver


class GrowableCPUWorker(GrowableWorker, CPUWorker):
    """Stock CPU worker and model runner V1; memory from the host driver."""

    platform = "cpu"

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self._limit_memory(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    @staticmethod
    def _limit_memory(vllm_config: VllmConfig) -> None:
        """`PDKV_ENGINE_MEMORY` in bytes, as the share of the memory node by which the stock worker computes."""
        limit = EngineSettings.from_environment().engine_memory
        if limit is not None:
            node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
            vllm_config.cache_config.gpu_memory_utilization = min(1.0, limit / node.total_memory)

    def open_driver(self) -> MemoryDriver:
        return pdkv.open_driver("host", granule=self.settings.granule)

    def begin_measuring(self) -> None:
        measure.reset_peak()

    def read_memory(self, driver: MemoryDriver, committed_bytes: int) -> MemoryReading:
        process = measure.process_memory()
        return measure.host_reading(process, driver.memory_info(), committed_bytes, self.requested_cpu_memory)

    def rebind(self, config: Any, views: dict[str, Any]) -> None:
        rebind.rebind_v1(self.model_runner, config, views)

    # Stock sleep of the CPU worker is a line in the log. Weights stay in memory here too: a host has no other place for
    # them, so that the tag "weights" has nothing to release and nothing to load, at any level.

    def sleep(self, level: int = 1) -> None:
        self.put_cache_to_sleep()

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            self.wake_cache()

    def discard(self, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            self.put_cache_to_sleep()
