"""Copies, conversions and sums on the host, in steps of a millisecond or so between which others can run.

A loop of memoryview slices is what copies fastest without a compiler: over blocks of 32 KiB it takes a tenth less than
one of memmove() by ctypes, and a quarter of what torch's index operations take beside busy neighbours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pdkv_connectors.ipc.convert import copy_units, page_keys, page_view, take_units, unit_view
from pdkv_connectors.ipc.hashing import WORD_NBYTES, granule_states, hash_words
from pdkv_connectors.ipc.legs import Leg
from pdkv_connectors.ipc.plan import PagePlan, PageShape

Ids = npt.NDArray[np.int32]

STEP_NBYTES = 8 << 20
"""Bytes that one step copies, about a millisecond."""

WORK_STEP_NBYTES = 1 << 20
"""Bytes that one step sums or converts, about as long."""

RawTensor = Callable[[int, int], torch.Tensor]
"""int8 over (offset, nbytes) of a memory."""


def bytes_at(address: int, nbytes: int) -> memoryview:
    """The memory at an address, which somebody else keeps mapped."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def copy_slices(
    source: memoryview, destination: memoryview, copies: Iterator[tuple[int, int, int]], nbytes: int
) -> bool:
    """Copy until `nbytes` bytes are done. Whether there may be more."""
    left = nbytes
    for begin, to, size in copies:
        destination[to : to + size] = source[begin : begin + size]
        left -= size
        if left <= 0:
            return True
    return False


def units_in_step(plan: PagePlan) -> int:
    """Units of one layer that are summed or converted in a step."""
    return max(1, WORK_STEP_NBYTES // plan.unit_nbytes)


class HostLeg:
    """A leg over two memories of the host."""

    def __init__(self, leg: Leg, num_blocks: tuple[int, int], inverses: Sequence[tuple[float, float]]) -> None:
        """
        Args:
            num_blocks: committed blocks of source and destination.
            inverses: 1 / scale of K and of V for each layer of the leg.
        """
        self.leg = leg
        self._num_blocks = num_blocks
        self._inverses = inverses
        self._keys: npt.NDArray[np.uint32] | None = None

    def convert(
        self, layer: int, source: RawTensor, destination: RawTensor, sums: RawTensor | None, ids: Ids
    ) -> int | None:
        """Copy units of one layer, converting them; the place in `ids` of a unit whose sum was wrong, or None.

        What is summed is a copy: what is checked and what is written then are the same bytes.
        """
        plan = self.leg.plan
        units = ids.reshape(2, -1).astype(np.int64)
        view = self._view(source, plan.source, self.leg.source_offsets[layer], self._num_blocks[0])
        target = self._view(destination, plan.destination, self.leg.destination_offsets[layer], self._num_blocks[1])
        taken = take_units(unit_view(view, plan.unit, plan.heads.source, plan.heads.count), units[0])
        if sums is not None and (wrong := self._first_wrong(taken, units[0], sums, layer)) is not None:
            return wrong
        copy_units(plan, taken, target, units[1], self._inverses[layer])
        return None

    def verify(self, layer: int, destination: RawTensor, sums: RawTensor, ids: Ids) -> int | None:
        """The place in `ids` of a unit that was copied as it is, and whose sum is wrong; None where all are right."""
        plan = self.leg.plan
        units = ids.reshape(2, -1).astype(np.int64)
        view = self._view(destination, plan.destination, self.leg.destination_offsets[layer], self._num_blocks[1])
        taken = take_units(unit_view(view, plan.unit, plan.heads.destination, plan.heads.count), units[1])
        return self._first_wrong(taken, units[0], sums, layer)

    def _view(self, raw: RawTensor, shape: PageShape, offset: int, num_blocks: int) -> torch.Tensor:
        nbytes = (num_blocks - 1) * shape.block_stride + shape.nbytes
        return page_view(raw(offset, nbytes), shape, num_blocks)

    def _first_wrong(
        self, units: npt.NDArray[np.int8], source_units: npt.NDArray[np.int64], sums: RawTensor, layer: int
    ) -> int | None:
        """`units`: int8 ``[units, heads, unit, C]``."""
        plan = self.leg.plan
        heads, size = plan.heads, granule_states(plan.source.num_states)
        table = sums(self.leg.sum_offsets[layer], self._num_blocks[0] * plan.source.sums * WORD_NBYTES).numpy()
        table = table.view(np.int64).reshape(self._num_blocks[0], plan.source.num_heads, plan.source_units, -1)
        expected = table[source_units // plan.source_units, :, source_units % plan.source_units]
        expected = expected[:, heads.source : heads.source + heads.count]
        words = units.view(np.int64).reshape(len(units), heads.count, plan.unit // size, -1)
        keys = self._all_keys()
        # Where each block is one unit, all units have the same keys.
        keys = keys[0] if len(keys) == 1 else keys[source_units % plan.source_units]
        found = hash_words(words, keys.reshape(*keys.shape[:-3], heads.count, plan.unit // size, -1, 2))
        wrong = np.flatnonzero((found != expected).reshape(len(words), -1).any(1))
        return int(wrong[0]) if len(wrong) else None

    def _all_keys(self) -> npt.NDArray[np.uint32]:
        """uint32 ``[units of a block, heads, unit * C, 2]``: the keys of the words of the slice."""
        if self._keys is None:
            self._keys = unit_keys(self.leg.plan)
        return self._keys


def unit_keys(plan: PagePlan) -> npt.NDArray[np.uint32]:
    """uint32 ``[units of a block of the source, heads, unit * C, 2]``: the keys of the words of the slice."""
    wanted = page_keys(plan.source)[plan.heads.source : plan.heads.source + plan.heads.count]
    split = wanted.reshape(plan.heads.count, plan.source_units, -1, 2)
    return np.ascontiguousarray(split.swapaxes(0, 1))


class HostCopy:
    """One transfer: slices of memory, then sums; or units to convert. Nothing moves but in :meth:`advance`."""

    def __init__(
        self,
        source: HostSide,
        destination: HostSide,
        sums: RawTensor | None,
        copies: Iterator[tuple[int, int, int]] | None,
        jobs: Sequence[tuple[HostLeg, Ids]],
    ) -> None:
        """
        Args:
            sums: the source's table of sums; None where nothing is to be verified.
            copies: (source offset, destination offset, nbytes) of everything, where bytes are copied as they are.
            jobs: for each leg the units of the source and of the destination, int32 ``[2, units]``.
        """
        self._source, self._destination, self._sums = source, destination, sums
        self._copies = copies
        self._as_is = copies is not None
        self._parts = self._every_part(jobs)
        #: What was found wrong, once there is something.
        self.problem = ""

    def advance(self) -> bool:
        """Go on for a millisecond or so; whether everything is done. The memory of both sides must be there."""
        if self._copies is not None:
            if not copy_slices(self._source.bytes, self._destination.bytes, self._copies, STEP_NBYTES):
                self._copies = None
                return self._sums is None
            return False
        left = WORK_STEP_NBYTES
        while left > 0:  # a request of few blocks has little in each of many layers
            part = next(self._parts, None)
            if part is None:
                return True
            leg, layer, ids = part
            if (wrong := self._work_off(leg, layer, ids)) is not None:
                self.problem = f"block {int(ids[0, wrong]) // leg.leg.plan.source_units}"
                return True
            left -= ids.shape[1] * leg.leg.plan.unit_nbytes
        return False

    def _work_off(self, leg: HostLeg, layer: int, ids: Ids) -> int | None:
        """Sum or convert units of one layer; the place in `ids` of a unit whose sum was wrong, or None."""
        if not self._as_is:
            return leg.convert(layer, self._source.raw, self._destination.raw, self._sums, ids)
        return leg.verify(layer, self._destination.raw, self._sums, ids) if self._sums is not None else None

    def _every_part(self, jobs: Sequence[tuple[HostLeg, Ids]]) -> Iterator[tuple[HostLeg, int, Ids]]:
        for leg, ids in jobs:
            step = units_in_step(leg.leg.plan)
            for layer in range(len(leg.leg.layers)):
                for first in range(0, ids.shape[1], step):
                    yield leg, layer, ids[:, first : first + step]


class HostSide:
    """A cache as bytes and as tensors, offsets from its base."""

    def __init__(self, address: int, nbytes: int, raw: RawTensor) -> None:
        self.bytes = bytes_at(address, nbytes)
        self.raw = raw
