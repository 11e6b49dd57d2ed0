"""How much memory the KV cache may take on a host, measured on the worker's own process after warmup.

A host is shared: other engines start beside this one, and what they take must not count as this engine's use. So on a
host "used by anything but the KV cache" is the resident memory of the worker process without shared memory (the chunks
of the cache are memfds, which the kernel counts as shared), and only the bound by free memory looks at the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from pdkv.kvcache.sizing import MemoryReading
from pdkv.memory.process import ProcessMemory, process_memory
from pdkv.memory.process import reset_peak as reset_peak_of

if TYPE_CHECKING:
    from pdkv.memory import MemoryInfo

logger = init_logger(f"vllm.{__name__}")


def reset_peak() -> bool:
    """Set this process's peak resident memory back to its present value; false where the kernel refuses."""
    try:
        reset_peak_of()
    except OSError as error:
        logger.warning("cannot reset the peak of resident memory (%s): start-up's peak counts as warmup's", error)
        return False
    return True


def host_reading(process: ProcessMemory, machine: MemoryInfo, committed_bytes: int, requested: int) -> MemoryReading:
    """The reading of :func:`pdkv.kvcache.sizing.decide_final_blocks` for a worker on a host.

    `init_free_memory` is what would be free if this process used nothing, so that the difference to what is free now is
    what this process uses, whatever others did meanwhile.
    """
    return MemoryReading(
        init_free_memory=machine.free + committed_bytes + process.private,
        free_memory=machine.free,
        requested_memory=requested,
        transient_peak_bytes=max(0, process.peak - process.resident),
    )


__all__ = ["ProcessMemory", "host_reading", "process_memory", "reset_peak"]
