"""The seam "memory utilization": what share of a card was asked for, if any, and who else is on it.

vLLM fills in its own default before a worker sees the configuration, so nobody can tell the default from the same value
given on purpose. pdkv takes it for not given; `PDKV_MEMORY_UTILIZATION` says it on purpose.

On the CPU nothing of this applies: a host is always shared, so there vLLM's own share and its check stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import CacheConfig
from vllm.logger import init_logger

from pdkv.errors import DriverUnavailableError
from pdkv.memory.nvml import other_processes

if TYPE_CHECKING:
    from pdkv_connectors.vllm.settings import EngineSettings

logger = init_logger(f"vllm.{__name__}")


def given_utilization(cache_config: CacheConfig, settings: EngineSettings, total_memory: int) -> float | None:
    """The share of the card that the user asked for, in (0, 1]; None where they left it to the engine.

    In this order: `PDKV_ENGINE_MEMORY` (bytes), `PDKV_MEMORY_UTILIZATION`, ``--gpu-memory-utilization`` where it is not
    vLLM's default.
    """
    if settings.engine_memory is not None:
        return min(1.0, settings.engine_memory / total_memory)
    if settings.memory_utilization is not None:
        return settings.memory_utilization
    share: float = cache_config.gpu_memory_utilization
    return None if share == CacheConfig.gpu_memory_utilization else share


def processes_beside(uuid: str, nvml: Any = None) -> tuple[str, ...]:
    """Who else uses the card; nobody, with a warning, where NVML cannot say.

    Args:
        nvml: NVML's Python module; None takes vLLM's copy of it.
    """
    if nvml is None:
        from vllm.third_party import pynvml as nvml
    try:
        return other_processes(uuid, nvml)
    except DriverUnavailableError as error:
        logger.warning(
            "pdkv: %s The KV cache will take all that is free: where other processes use this card, set "
            "--gpu-memory-utilization.",
            error,
        )
        return ()
