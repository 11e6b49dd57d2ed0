"""A peer as a transport keeps it: the link to it, and the legs by which its pages become pages here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pdkv.errors import TransportError
from pdkv_connectors.ipc.board import Marks, PeerBoard
from pdkv_connectors.ipc.columns import BlockColumns, Ids
from pdkv_connectors.ipc.legs import Leg

if TYPE_CHECKING:
    import torch

    from pdkv.kvcache import GrowableKVCache
    from pdkv.memory import MemoryDriver
    from pdkv.transfer.geometry import CacheGeometry
    from pdkv_connectors.ipc.cuda_mover import CudaMover, CudaWork
    from pdkv_connectors.ipc.link import Link
    from pdkv_connectors.native import Kernels

CACHE, SUMS, BOARD = 0, 1, 2
Legs = tuple[tuple[Leg, ...], ...]
Scales = Sequence[tuple[float, float]] | None


@dataclass(frozen=True, slots=True)
class Between:
    """What a route runs between.

    Attributes:
        link: to the peer's memory.
        source, destination: the peer's cache and this one.
        legs: for each KV-cache group, which pages become which.
        scales: (scale of K, scale of V) for each layer, where values are converted to fp8.
        verify: whether the sums of what is copied are compared with the peer's.
    """

    link: Link
    source: CacheGeometry
    destination: CacheGeometry
    legs: Legs
    scales: Scales
    verify: bool


class Running(Protocol):
    """A copy that was started."""

    def advance(self) -> bool:
        """Go on without waiting; whether it has ended. Needs the link's lock where `needs_memory`."""

    @property
    def wrong_block(self) -> int | None:
        """The source's block whose sum was wrong, once it has ended; None where none was."""


class Route(ABC):
    """One peer in one generation.

    Attributes:
        legs: for each KV-cache group.
        source_units, destination_units: how many ids there are on either side, for each group.
        needs_memory: whether :meth:`Running.advance` touches the peer's memory itself.
    """

    needs_memory: bool

    def __init__(self, between: Between) -> None:
        self.link = link = between.link
        self.legs = legs = between.legs
        self.source, self.destination = source, destination = between.source, between.destination
        self.source_units = [source.num_blocks * group[0].plan.source_units for group in legs]
        self.destination_units = [destination.num_blocks * group[0].plan.destination_units for group in legs]
        self._units_of_block = [group[0].plan.source_units for group in legs]
        self._nbytes_of_unit = [sum(leg.plan.unit_nbytes * len(leg.layers) for leg in group) for group in legs]
        self._board = PeerBoard(link.memories[BOARD], source.num_blocks)

    def marks(self, columns: Sequence[BlockColumns]) -> list[Marks]:
        """What P says of the blocks of each part. With the link's lock held."""
        units = self._units_of_block
        return [self._board.marks(part.few[0] if part.few else part.source, units[part.group]) for part in columns]

    def missing(self, columns: Sequence[BlockColumns], marks: Sequence[Marks]) -> list[tuple[int, list[int]]]:
        """All blocks of each group of which P has not announced some, by :meth:`marks`."""
        found = []
        for part, of_part in zip(columns, marks, strict=True):
            if not (all(of_part) if isinstance(of_part, list) else of_part.all()):
                found.append((part.group, np.unique(part.source // self._units_of_block[part.group]).tolist()))
        return found

    def was_taken_back(self, block: int, columns: Sequence[BlockColumns], marks: Sequence[Marks]) -> bool:
        """Whether P may have written a block since the marks were looked at. With the link's lock held."""
        (now,) = self._board.marks([block], 1)
        blocks = (part.source // self._units_of_block[part.group] for part in columns)
        then = {
            int(mark) for ids, of_part in zip(blocks, marks, strict=True) for mark in np.asarray(of_part)[ids == block]
        }
        return now == 0 or then != {now}

    def nbytes(self, columns: Sequence[BlockColumns]) -> int:
        """Bytes that the columns stand for, as the source counts them."""
        return sum([len(part.source) * self._nbytes_of_unit[part.group] for part in columns])

    @abstractmethod
    def start(self, columns: Sequence[BlockColumns], programs: int | None) -> Running:
        """Start to copy. With the link's lock held."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until nothing reads the peer's memory any more. From any thread."""

    def close(self) -> None:
        """Let go of the peer."""
        self.link.close()


def inverses_of(leg: Leg, scales: Scales) -> list[tuple[float, float]]:
    """1 / scale of K and of V for each layer of a leg."""
    if scales is None:
        return [(1.0, 1.0)] * len(leg.layers)
    return [(1.0 / scales[layer][0], 1.0 / scales[layer][1]) for layer in leg.layers]


class CudaRoute(Route):
    """By kernels."""

    needs_memory = False

    def __init__(self, between: Between, base: int, mover: CudaMover) -> None:
        super().__init__(between)
        self._mover = mover
        sums = self.link.memories[SUMS].address if between.verify else None
        cache = self.link.memories[CACHE].address
        self._ready = [
            [mover.copy_leg(leg, cache, base, sums, inverses_of(leg, between.scales)) for leg in group]
            for group in self.legs
        ]

    def start(self, columns: Sequence[BlockColumns], programs: int | None) -> Running:
        jobs = [(self._ready[part.group], part.source, part.destination) for part in columns]
        return _OnDevice(self._mover.start_copy(jobs, programs), columns, self)

    def drain(self) -> None:
        self._mover.drain()

    def close(self) -> None:
        super().close()
        self._mover.free([leg for group in self._ready for leg in group])
        self._ready = []


class _OnDevice:
    """A copy that a device does by itself."""

    def __init__(self, work: CudaWork, columns: Sequence[BlockColumns], route: CudaRoute) -> None:
        self._work = work
        self._columns = columns
        self._route = route

    def advance(self) -> bool:
        return self._work.is_done()

    @property
    def wrong_block(self) -> int | None:
        if self._work.fault is None:
            return None
        number, place = self._work.fault
        part = self._columns[number]
        return int(part.source[place]) // self._route.legs[part.group][0].plan.source_units


class HostRoute(Route):
    """By compiled kernels, or by slices and numpy."""

    needs_memory = True

    def __init__(self, between: Between, cache: GrowableKVCache, driver: MemoryDriver, kernels: Kernels | None) -> None:
        from pdkv.transfer.fit import first_difference
        from pdkv_connectors.ipc.host_leg import HostLeg, HostSide

        def side(address: int, whole: torch.Tensor) -> HostSide:
            return HostSide(address, lambda offset, nbytes: whole[offset : offset + nbytes])

        def imported(number: int) -> HostSide:
            of = self.link.memories[number]
            return side(of.address, driver.tensor(of.address, of.nbytes, self.link))

        super().__init__(between)
        self._cache = cache
        # Made once: three tensors would take as long as the copy of a block. They keep this route alive, by its link,
        # and the cache's addresses; so close() drops them.
        sums = imported(SUMS) if between.verify else None
        self._sides: Sides | None = (imported(CACHE), side(cache.address, cache.raw_tensor()), sums)
        alike = first_difference(self.source, self.destination) is None
        as_is = alike and all(leg.plan.takes_all_heads for group in self.legs for leg in group)
        self._by_slices = as_is and kernels is None
        counts = (self.source.num_blocks, self.destination.num_blocks)
        self._ready = [
            [HostLeg(leg, counts, inverses_of(leg, between.scales), kernels) for leg in group] for group in self.legs
        ]

    def start(self, columns: Sequence[BlockColumns], programs: int | None) -> Running:
        from pdkv_connectors.ipc.host_mover import HostCopy

        jobs: list[tuple[HostLeg, Ids]] = [
            (leg, np.stack((part.source, part.destination))) for part in columns for leg in self._ready[part.group]
        ]
        slices = self._slices(columns) if self._by_slices else None
        if self._sides is None:
            raise TransportError("the peer has been let go of; handshake with it again.")
        return HostCopy(*self._sides, slices, jobs)

    def close(self) -> None:
        super().close()
        self._sides = None

    def _slices(self, columns: Sequence[BlockColumns]) -> Slices:
        from pdkv.transfer.runs import copies_for
        from pdkv_connectors.ipc.host_mover import Slices, bytes_at

        memory, cache = self.link.memories[CACHE], self._cache
        copies = copies_for(self.source, self.destination, [pair for part in columns for pair in part])
        source = bytes_at(memory.address, memory.nbytes)
        return Slices(copies, source, bytes_at(cache.address, cache.bytes_reserved))

    def drain(self) -> None:
        """Steps hold the link's lock, and look first whether it is open."""
        with self.link.lock:
            return


if TYPE_CHECKING:
    from pdkv_connectors.ipc.host_leg import HostLeg, HostSide
    from pdkv_connectors.ipc.host_mover import Slices

    Sides = tuple[HostSide, HostSide, HostSide | None]  # the peer's cache, this one, the peer's sums
