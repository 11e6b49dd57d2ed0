"""The peak memory of another process while something runs."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from pdkv.errors import HarnessError
from pdkv.memory.process import ProcessMemory, process_memory, reset_peak

#: A step of a small model on the CPU takes some 20 ms, its transients live for a part of it.
POLL_S = 0.005


class PrivatePeak:
    """While open, follows the resident memory of process `pid` without shared memory; :attr:`nbytes` is its peak.

    The kernel's own high-water mark is taken where it can be reset, so that no short peak is missed; polling is what is
    left elsewhere. The mark counts shared memory too, which must therefore not change meanwhile: committed blocks of a
    cache do not.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="pdkv-peak", daemon=True)
        self._exact = False
        self.nbytes = 0

    def __enter__(self) -> Self:
        try:
            reset_peak(self._pid)
            self._exact = True
        except OSError:
            self._exact = False
        self.nbytes = self._read().private
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=10.0)
        if kind is None:
            last = self._read()
            shared = last.resident - last.private
            self.nbytes = max(self.nbytes, last.private, last.peak - shared if self._exact else 0)

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self.nbytes = max(self.nbytes, process_memory(pid=self._pid).private)
            except (OSError, KeyError):  # it has ended; __exit__ says so
                return

    def _read(self) -> ProcessMemory:
        try:
            return process_memory(pid=self._pid)
        except (OSError, KeyError) as error:
            raise HarnessError(f"the process {self._pid} whose memory is watched has ended; see its log.") from error


__all__ = ["PrivatePeak"]
