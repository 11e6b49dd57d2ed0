"""Drivers around a driver: with a budget, with counts of calls, with failures on order.

They add one thing each and pass everything else on, so they can be stacked: `LimitedDriver(CountingDriver(d), n)`.
A call for many ranges passes as the single calls that it stands for, so that each of them is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pdkv.errors import ConfigError, DriverError, OutOfMemoryError
from pdkv.memory.driver import MappedChunk, MemoryDriver, MemoryInfo, PhysicalChunk, Progress

if TYPE_CHECKING:
    import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ForwardingDriver(MemoryDriver):
    """Passes every call on to `inner`, through the one method that subclasses override."""

    def __init__(self, inner: MemoryDriver) -> None:
        self.inner = inner
        self.name = inner.name
        self.device_id = inner.device_id
        self.granule = inner.granule

    def _forward(self, kind: str, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Carry out one call. `kind` is the method's name."""
        return call(*args, **kwargs)

    def reserve(self, nbytes: int) -> int:
        return self._forward("reserve", self.inner.reserve, nbytes)

    def unreserve(self, address: int, nbytes: int) -> None:
        self._forward("unreserve", self.inner.unreserve, address, nbytes)

    def create(self, nbytes: int) -> PhysicalChunk:
        return self._forward("create", self.inner.create, nbytes)

    def release(self, chunk: PhysicalChunk) -> None:
        self._forward("release", self.inner.release, chunk)

    def is_pinned(self, chunk: PhysicalChunk) -> bool | None:
        return self._forward("is_pinned", self.inner.is_pinned, chunk)

    def map(self, address: int, chunk: PhysicalChunk) -> None:
        self._forward("map", self.inner.map, address, chunk)

    def unmap(self, address: int, nbytes: int) -> None:
        self._forward("unmap", self.inner.unmap, address, nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        self._forward("zero", self.inner.zero, address, nbytes)

    def zero_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._forward("zero_all", super().zero_all, ranges)

    def back(self, ranges: Sequence[tuple[int, int]], progress: Progress) -> None:
        self._forward("back", super().back, ranges, progress)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self._forward("copy", self.inner.copy, destination, source, nbytes)

    def query_chunks(self, address: int, nbytes: int) -> tuple[MappedChunk, ...]:
        return self._forward("query_chunks", self.inner.query_chunks, address, nbytes)

    def memory_info(self) -> MemoryInfo:
        return self._forward("memory_info", self.inner.memory_info)

    def export_fd(self, chunk: PhysicalChunk) -> int:
        return self._forward("export_fd", self.inner.export_fd, chunk)

    def import_fd(self, fd: int, nbytes: int) -> PhysicalChunk:
        return self._forward("import_fd", self.inner.import_fd, fd, nbytes)

    def map_read_only(self, address: int, chunk: PhysicalChunk) -> None:
        self._forward("map_read_only", self.inner.map_read_only, address, chunk)

    def tensor(self, address: int, nbytes: int, keepalive: object) -> torch.Tensor:
        return self._forward("tensor", self.inner.tensor, address, nbytes, keepalive)

    def synchronize(self) -> None:
        self._forward("synchronize", self.inner.synchronize)

    def describe(self) -> dict[str, str | int | bool]:
        return self._forward("describe", self.inner.describe)

    def close(self) -> None:
        self._forward("close", self.inner.close)


CALL_KINDS = frozenset(name for name, value in vars(ForwardingDriver).items() if callable(value) and name[0] != "_")
"""The calls that can be counted and made to fail, by the names of the contract's methods."""


class LimitedDriver(ForwardingDriver):
    """A driver that owns no more than `limit` bytes of chunks at a time, however much memory there is."""

    def __init__(self, inner: MemoryDriver, limit: int) -> None:
        """
        Args:
            limit: bytes; need not be a multiple of the granule.
        """
        super().__init__(inner)
        if limit < 0:
            raise ConfigError(f"a limit of {limit} bytes is negative; give the bytes that chunks may take")
        self.limit = limit
        self.used = 0
        self._imported: list[PhysicalChunk] = []

    def create(self, nbytes: int) -> PhysicalChunk:
        left = self.limit - self.used
        if nbytes > left:
            raise OutOfMemoryError(
                f"the limit of {self.limit} bytes is reached: {nbytes} wanted, {left} left", wanted=nbytes, free=left
            )
        chunk = super().create(nbytes)
        self.used += nbytes
        return chunk

    def import_fd(self, fd: int, nbytes: int) -> PhysicalChunk:
        """A peer's chunk, which counts for the peer alone."""
        self._imported.append(super().import_fd(fd, nbytes))
        return self._imported[-1]

    def release(self, chunk: PhysicalChunk) -> None:
        super().release(chunk)
        others = [other for other in self._imported if other is not chunk]
        if len(others) == len(self._imported):
            self.used -= chunk.nbytes
        self._imported = others

    def memory_info(self) -> MemoryInfo:
        info = super().memory_info()
        return MemoryInfo(min(info.free, self.limit - self.used), min(info.total, self.limit))

    def describe(self) -> dict[str, str | int | bool]:
        return {**super().describe(), "limit": self.limit}


class CountingDriver(ForwardingDriver):
    """Counts calls by kind in `calls`, those that fail included."""

    def __init__(self, inner: MemoryDriver) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    def _forward(self, kind: str, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self.calls[kind] += 1
        return super()._forward(kind, call, *args, **kwargs)


class FailingDriver(ForwardingDriver):
    """Fails calls on order, before they reach the inner driver, which so leaves everything as it was."""

    def __init__(self, inner: MemoryDriver) -> None:
        super().__init__(inner)
        self._kinds: frozenset[str] = frozenset()
        self._to_pass = 0
        self._to_fail = 0
        self._error: Callable[[str], Exception] = _refusal
        self.failures = 0

    def fail(
        self,
        kinds: str | Iterable[str],
        nth: int = 1,
        *,
        times: int = 1,
        error: Callable[[str], Exception] | None = None,
    ) -> None:
        """Let the `nth` call of these kinds from now on fail, and the `times - 1` after it. Replaces earlier orders.

        Args:
            kinds: names of methods of the contract.
            nth: 1 is the next call.
            times: how many calls in a row fail.
            error: makes the exception from the kind; a DriverError unless given. :func:`out_of_memory` is another one.

        Raises:
            ConfigError: a kind that does not exist, or a number below 1.
        """
        wanted = frozenset([kinds] if isinstance(kinds, str) else kinds)
        if not wanted or wanted - CALL_KINDS:
            raise ConfigError(f"no such calls: {sorted(wanted - CALL_KINDS)}; choose from {sorted(CALL_KINDS)}")
        if nth < 1 or times < 1:
            raise ConfigError(f"nth and times count from 1, not {nth} and {times}")
        self._kinds, self._to_pass, self._to_fail = wanted, nth - 1, times
        self._error = error or _refusal

    def relent(self) -> None:
        """Fail nothing any more."""
        self._to_fail = 0

    def _forward(self, kind: str, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self._to_fail and kind in self._kinds:
            if self._to_pass == 0:
                self._to_fail -= 1
                self.failures += 1
                raise self._error(kind)
            self._to_pass -= 1
        return super()._forward(kind, call, *args, **kwargs)


def out_of_memory(kind: str) -> OutOfMemoryError:
    """For :meth:`FailingDriver.fail`: memory ran out, though it seemed to be there."""
    return OutOfMemoryError(f"{kind} ran out of memory, on order", wanted=0, free=0)


def _refusal(kind: str) -> DriverError:
    return DriverError(f"{kind} was refused, on order")
