"""Drivers with one mistake in what leaves them: tensors, and descriptors of chunks."""

from __future__ import annotations

import os

import torch
from wrong_driver import Wrong, caught_by

from pdkv.memory import (
    PhysicalChunk,
)


@caught_by("makes_tensors_of_exactly_the_range_without_touching_it")
class CutsTensorsFromALargerStorage(Wrong):
    def tensor(self, address: int, nbytes: int, keepalive: object) -> torch.Tensor:
        begin = address // self.granule * self.granule
        end = -(-(address + nbytes) // self.granule) * self.granule
        whole = super().tensor(begin, end - begin, keepalive)
        return whole[address - begin : address - begin + nbytes]


@caught_by("makes_tensors_of_exactly_the_range_without_touching_it")
class MakesBytesUnsigned(Wrong):
    def tensor(self, address: int, nbytes: int, keepalive: object) -> torch.Tensor:
        return super().tensor(address, nbytes, keepalive).view(torch.uint8)


@caught_by("makes_tensors_of_exactly_the_range_without_touching_it")
class CopiesForTensors(Wrong):
    def tensor(self, address: int, nbytes: int, keepalive: object) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.int8)


@caught_by("keeps_alive_what_a_tensor_needs")
class ForgetsTheOwner(Wrong):
    def tensor(self, address: int, nbytes: int, keepalive: object) -> torch.Tensor:
        return super().tensor(address, nbytes, None)


@caught_by("keeps_alive_what_a_tensor_needs")
class KeepsTheOwnerForEver(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.owners: list[object] = []

    def tensor(self, address: int, nbytes: int, keepalive: object) -> torch.Tensor:
        self.owners.append(keepalive)
        return super().tensor(address, nbytes, keepalive)


@caught_by("exports_descriptors_that_the_caller_owns")
class ExportsItsOwnDescriptor(Wrong):
    """The caller's closing it would close the chunk, were the suite not to notice first."""

    exported: int | None = None

    def export_fd(self, chunk: PhysicalChunk) -> int:
        if self.exported is None:
            self.exported = super().export_fd(chunk)
        return self.exported


@caught_by("exports_descriptors_that_the_caller_owns")
class NeverSeesAPin(Wrong):
    def is_pinned(self, chunk: PhysicalChunk) -> bool | None:
        return False


@caught_by("exports_descriptors_that_the_caller_owns")
class AlwaysSeesAPin(Wrong):
    def is_pinned(self, chunk: PhysicalChunk) -> bool | None:
        return True


@caught_by("imports_what_was_exported")
class ImportsACopy(Wrong):
    def import_fd(self, fd: int, nbytes: int) -> PhysicalChunk:
        chunk = self.create(nbytes)
        os.pwrite(chunk.handle, os.pread(fd, nbytes, 0), 0)
        return chunk


@caught_by("imports_what_was_exported")
class MapsForWritingWhatIsToBeRead(Wrong):
    def map_read_only(self, address: int, chunk: PhysicalChunk) -> None:
        self.map(address, chunk)
