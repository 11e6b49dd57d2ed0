"""Memory of one GPU by cuMemAlloc, under a cache of pdkv: what a stock engine registers with NIXL.

It does not grow. It is here to compare: where UCX cannot export virtual memory it moves this, and only this, directly.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from pdkv.memory._vmm import VmmDriver
from pdkv.memory.cuda import CudaApi

PLAIN = "cuda-malloc"
"""What the benchmarks call such memory where others are named by their driver."""


class PlainMemoryApi(CudaApi):
    """All the memory of a range is there once the range is reserved; chunks and mappings are kept as numbers only."""

    def __init__(self, module: Any, device: int) -> None:
        super().__init__(module, device)
        self._numbers = count(1)
        self._mapped: dict[int, tuple[int, int]] = {}

    def address_reserve(self, nbytes: int, alignment: int) -> int:
        address = int(self.call("cuMemAlloc", nbytes, wanted=nbytes))
        if address % alignment:
            raise RuntimeError(f"cuMemAlloc gave {address:#x}, which is no multiple of {alignment}")
        return address

    def address_free(self, address: int, nbytes: int) -> None:
        self.call("cuMemFree", address)

    def create(self, nbytes: int) -> int:
        return next(self._numbers)

    def release(self, handle: int) -> None:
        return

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._mapped[address] = (nbytes, handle)

    def unmap(self, address: int, nbytes: int) -> None:
        del self._mapped[address]

    def set_access(self, address: int, nbytes: int) -> None:
        return

    def mapping_at(self, address: int) -> tuple[int, int, int] | None:
        found = self._mapped.get(address)
        return None if found is None else (address, *found)


def open_plain_driver(device: int = 0) -> VmmDriver:
    """The driver of a cache whose memory is all taken at once."""
    from cuda.bindings import driver as cuda

    return VmmDriver(PlainMemoryApi(cuda, device), device)
