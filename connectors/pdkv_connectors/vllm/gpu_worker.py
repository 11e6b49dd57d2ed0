"""vLLM's CUDA worker with a growable KV cache in CUDA virtual memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.multimodal.gpu_ipc_memory import reserve_mm_ipc_gpu_memory
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import request_memory

import pdkv
from pdkv.errors import ConfigError, ConnectorError
from pdkv.kvcache.sizing import MemoryReading, resolve_utilization
from pdkv.kvcache.torch_allocator import cap_torch_allocator, read_torch, start_warmup_reading
from pdkv_connectors.nixl import probe
from pdkv_connectors.nixl.settings import SLOW_DEVICE_GBPS
from pdkv_connectors.vllm import rebind, sleep_backend
from pdkv_connectors.vllm.growth import GrowableWorker
from pdkv_connectors.vllm.patches import SLEEP_BACKEND
from pdkv_connectors.vllm.utilization import given_utilization, processes_beside

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pdkv.kvcache import GrowableKVCache
    from pdkv.memory import MemoryDriver

logger = init_logger(f"vllm.{__name__}")


class GrowableGPUWorker(GrowableWorker, Worker):
    """Stock CUDA worker with model runner V1 or V2; memory from the CUDA driver."""

    platform = "cuda"

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """As the stock worker.

        Raises:
            ConfigError: sleep mode with a backend that would leave the KV cache in memory, and registered.
        """
        model = vllm_config.model_config
        if model.enable_sleep_mode and model.sleep_mode_backend != SLEEP_BACKEND:
            raise ConfigError(
                f"the sleep backend {model.sleep_mode_backend!r} does not know the growable KV cache; add "
                f"--sleep-mode-backend {SLEEP_BACKEND}."
            )
        super().__init__(vllm_config, *args, **kwargs)
        sleep_backend.bind(self)

    def init_device(self) -> None:
        """The stock worker's, and after it the share of the card by which pdkv sizes.

        The stock worker refuses a share that is not free now, and the whole card never is: CUDA's context is on it.
        A growable cache is bounded by what is free, so the stock worker is only asked whether its own share is.

        Raises:
            ConfigError: no memory utilization was given on a card that other processes use.
        """
        index = current_platform.logical_device_id_to_visible_device_id(
            self.parallel_config.get_local_gpu_index(self.local_rank)
        )
        device = torch.cuda.get_device_properties(index)
        self._utilization = given_utilization(self.cache_config, self.settings, device.total_memory)
        sized = self._utilization is None and self.cache_config.kv_cache_memory_bytes is None
        others = processes_beside(str(device.uuid)) if sized else ()
        share = resolve_utilization(self._utilization, growable=True, other_processes=others, constants=self.constants)
        self.cache_config.gpu_memory_utilization = min(share, self.constants.fixed_utilization)
        super().init_device()
        self.cache_config.gpu_memory_utilization = share
        self.requested_memory = math.ceil(self.init_snapshot.total_memory * share)

    def use_fixed_utilization(self) -> None:
        """As the stock worker requests memory, with what was given or else the share of a fixed cache."""
        share = resolve_utilization(self._utilization, growable=False, constants=self.constants)
        self.cache_config.gpu_memory_utilization = share
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)

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
        start_warmup_reading(self.device)

    def read_memory(self, driver: MemoryDriver, committed_bytes: int) -> MemoryReading:
        reading = read_torch(self.device)
        return MemoryReading(
            init_free_memory=self.init_snapshot.free_memory,
            free_memory=driver.memory_info().free,
            requested_memory=int(self.requested_memory),
            transient_peak_bytes=reading.transient_peak(self.profiled_activation_bytes()),
            multimodal_ipc_bytes=self.multimodal_ipc_bytes(),
        )

    def profiled_activation_bytes(self) -> int:
        return int(getattr(self, "peak_activation_memory", 0))

    def multimodal_ipc_bytes(self) -> int:
        # vLLM's function takes it off a sum, and refuses a sum that does not hold it.
        sum_bytes = self.init_snapshot.total_memory
        api_processes = getattr(self.parallel_config, "_api_process_count", 1)
        left = reserve_mm_ipc_gpu_memory(sum_bytes, self.model_config.multimodal_config, api_processes)
        return int(sum_bytes - left)

    def cap_allocator(self) -> None:
        share = cap_torch_allocator(self.device, self.constants)
        logger.info("pdkv: torch may hold %.4f of the card from now on", share)

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
        if report.gb_per_s >= SLOW_DEVICE_GBPS:
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
