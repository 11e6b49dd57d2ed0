"""Memory of a process as Linux counts it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Of one process, in bytes.

    Attributes:
        private: resident without shared memory. Chunks of the host driver are memfds, which the kernel counts as
            shared, so they are not in it.
        resident: all resident memory.
        peak: its highest value since the process began, or since :func:`reset_peak`.
    """

    private: int
    resident: int
    peak: int


def process_memory(status: str | None = None, *, pid: int | None = None) -> ProcessMemory:
    """Read ``/proc/PID/status``, or `status`, its text. Source of the field names: proc_pid_status(5).

    Args:
        pid: None means this process.
    """
    text = _proc(pid).joinpath("status").read_text() if status is None else status
    fields = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return ProcessMemory(private=fields["RssAnon"] + fields["RssFile"], resident=fields["VmRSS"], peak=fields["VmHWM"])


def reset_peak(pid: int | None = None) -> None:
    """Set the peak of resident memory back to its present value.

    Source: proc_pid_clear_refs(5), value 5, since Linux 4.0.

    Raises:
        OSError: the kernel does not allow it; some sandboxes do not.
    """
    _proc(pid).joinpath("clear_refs").write_text("5")


def _proc(pid: int | None) -> Path:
    return Path("/proc", "self" if pid is None else str(pid))


__all__ = ["ProcessMemory", "process_memory", "reset_peak"]
