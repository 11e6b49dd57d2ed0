"""A driver on the bench: makes ranges and chunks for a check, counts in granules, and gives all of them back."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from pdkv.errors import PdkvError
from pdkv.memory.driver import MappedChunk, MemoryDriver, PhysicalChunk, Progress
from pdkv.testing.rules import require

if TYPE_CHECKING:
    import torch


class Bench:
    """What a check works with. Sizes are in granules, addresses in bytes."""

    def __init__(self, driver: MemoryDriver) -> None:
        self.driver = driver
        self.granule = driver.granule
        self._reserved: dict[int, int] = {}
        self._chunks: list[PhysicalChunk] = []
        self._mapped: dict[int, int] = {}

    def reserve(self, granules: int) -> int:
        address = self.driver.reserve(granules * self.granule)
        self._reserved[address] = granules * self.granule
        return address

    def unreserve(self, address: int) -> None:
        self.driver.unreserve(address, self._reserved[address])
        del self._reserved[address]

    def create(self, granules: int) -> PhysicalChunk:
        chunk = self.driver.create(granules * self.granule)
        self._chunks.append(chunk)
        require(chunk.nbytes == granules * self.granule, "a chunk has the size that was asked for")
        return chunk

    def adopt(self, chunk: PhysicalChunk) -> None:
        """Give back a chunk too that came from elsewhere."""
        self._chunks.append(chunk)

    def release(self, chunk: PhysicalChunk) -> None:
        self.driver.release(chunk)
        self._chunks = [other for other in self._chunks if other is not chunk]

    def map(self, address: int, chunk: PhysicalChunk, *, read_only: bool = False) -> None:
        (self.driver.map_read_only if read_only else self.driver.map)(address, chunk)
        self._mapped[address] = chunk.nbytes

    def unmap(self, address: int) -> None:
        self.driver.unmap(address, self._mapped[address])
        del self._mapped[address]

    def back(self, ranges: list[tuple[int, int]], progress: Progress) -> None:
        """Back each (address, granules); whatever `progress` says is done is given back at the end."""
        sizes = [(address, granules * self.granule) for address, granules in ranges]
        known = len(progress.chunks)
        try:
            self.driver.back(sizes, progress)
        finally:
            self._chunks += progress.chunks[known:]
            self._mapped.update(sizes[: progress.mapped])

    def backed(self, address: int, granules: int, fill: int | None = None) -> PhysicalChunk:
        """Create a chunk, map it, and fill it with one byte value."""
        chunk = self.create(granules)
        self.map(address, chunk)
        if fill is not None:
            self.view(address, granules).fill_(fill)
        return chunk

    def query(self, address: int, granules: int) -> tuple[MappedChunk, ...]:
        return self.driver.query_chunks(address, granules * self.granule)

    def view(self, address: int, granules: int) -> torch.Tensor:
        return self.driver.tensor(address, granules * self.granule, self)

    def require_filled(self, address: int, granules: int, value: int) -> None:
        require(bool((self.view(address, granules) == value).all()), f"what was written ({value}) is read back")

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give everything back. A refusal counts only where the check itself went well."""
        try:
            for address in sorted(self._mapped):
                self.unmap(address)
            for chunk in list(self._chunks):
                self.release(chunk)
            for address in list(self._reserved):
                self.unreserve(address)
        except PdkvError:
            if error is None:
                raise
