"""How much memory the KV cache may take on a host, measured on the worker's own process after warmup.

A host is shared: other engines start beside this one, and what they take must not count as this engine's use. So on a
host "used by anything but the KV cache" is the resident memory of the worker process without shared memory (the chunks
of the cache are memfds, which the kernel counts as shared), and only the bound by free memory looks at the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from pdkv.kvcache.sizing import MemoryReading

if TYPE_CHECKING:
    from pdkv.memory import MemoryInfo

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Of one process, in bytes: resident memory without shared memory, all resident memory, and its highest value."""

    private: int
    resident: int
    peak: int


def process_memory(status: str | None = None) -> ProcessMemory:
    """Read ``/proc/self/status`` (or `status`, its text). Source of the field names: proc_pid_status(5)."""
    text = Path("/proc/self/status").read_text() if status is None else status
    fields = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return ProcessMemory(private=fields["RssAnon"] + fields["RssFile"], resident=fields["VmRSS"], peak=fields["VmHWM"])


def reset_peak() -> bool:
    """Set the peak resident memory of this process back to its present value; false where the kernel does not allow it.

    Source: proc_pid_clear_refs(5), value 5, since Linux 4.0.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
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
