"""Copies, conversions and sums on the host, in steps of a millisecond or so between which others can run.

A loop of memoryview slices is what copies fastest without a compiler: numpy's and torch's index operations took longer,
and memmove() by ctypes was no faster.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from pdkv.kvcache.specs import item_bytes
from pdkv_connectors.ipc.convert import column_units, copy_units, page_keys, page_view, take_units, unit_view
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
        steps = {
            (b - a, d - c) for (a, c), (b, d) in pairwise(zip(leg.destination_offsets, leg.sum_offsets, strict=True))
        }
        sums_nbytes = num_blocks[0] * leg.plan.source.sums * WORD_NBYTES
        #: Whether layers follow each other at equal steps, so that many are summed as one.
        self.is_even = len(steps) <= 1 and all(step >= 0 and apart == sums_nbytes for step, apart in steps)

    def convert(
        self, layer: int, source: RawTensor, destination: RawTensor, sums: RawTensor | None, ids: Ids
    ) -> int | None:
        """Copy units of one layer, converting them; the place in `ids` of a unit whose sum was wrong, or None.

        What is summed is a copy: what is checked and what is written then are the same bytes.
        """
        plan = self.leg.plan
        if plan.cuts_columns:
            return self._convert_columns(layer, source, destination, sums, ids)
        units = ids.reshape(2, -1).astype(np.int64)
        view = self._view(source, plan.source, self.leg.source_offsets[layer], self._num_blocks[0])
        target = self._view(destination, plan.destination, self.leg.destination_offsets[layer], self._num_blocks[1])
        taken = take_units(unit_view(view, plan.unit, plan.heads.source, plan.heads.count), units[0])
        if sums is not None and (wrong := self._first_wrong(plan, taken[None], units[0], sums, layer)) is not None:
            return wrong
        copy_units(plan, taken, target, units[1], self._inverses[layer])
        return None

    def verify(self, layers: range, destination: RawTensor, sums: RawTensor, ids: Ids) -> int | None:
        """The place in `ids` of a unit that was copied as it is, and whose sum is wrong; None where all are right.

        Args:
            layers: one, or several where the leg :attr:`is_even`.
        """
        plan, heads, shape = self.leg.plan, self.leg.plan.heads, self.leg.plan.destination
        units = ids.reshape(2, -1).astype(np.int64)
        first, last = (self.leg.destination_offsets[layer] for layer in (layers[0], layers[-1]))
        nbytes = last - first + (self._num_blocks[1] - 1) * shape.block_stride + shape.nbytes
        pages = np.lib.stride_tricks.as_strided(
            destination(first, nbytes).numpy()[heads.destination * shape.head_stride :],
            (len(layers), self._num_blocks[1], plan.destination_units, heads.count, plan.unit, shape.content_bytes),
            (
                (last - first) // max(len(layers) - 1, 1),
                shape.block_stride,
                plan.unit * shape.state_stride,
                shape.head_stride,
                shape.state_stride,
                1,
            ),
        )
        taken = pages[:, units[1] // plan.destination_units, units[1] % plan.destination_units]
        return self._first_wrong(plan, np.ascontiguousarray(taken), units[0], sums, layers[0])

    def _convert_columns(
        self, layer: int, source: RawTensor, destination: RawTensor, sums: RawTensor | None, ids: Ids
    ) -> int | None:
        """As :meth:`convert`. Whole pages are copied and checked: the bytes of a unit are spread over its page."""
        plan, heads = self.leg.plan, self.leg.plan.heads
        units = ids.reshape(2, -1).astype(np.int64)
        blocks, places = units[0] // plan.source_units, units[1] // plan.destination_units
        view = self._view(source, plan.source, self.leg.source_offsets[layer], self._num_blocks[0])
        pages = np.ascontiguousarray(view.narrow(1, heads.source, heads.count).numpy()[blocks])
        if sums is not None:
            whole = replace(plan, unit=plan.source.num_states)
            if (wrong := self._first_wrong(whole, pages[None], blocks, sums, layer)) is not None:
                return wrong
        target = self._view(destination, plan.destination, self.leg.destination_offsets[layer], self._num_blocks[1])
        target = target.narrow(1, heads.destination, heads.count)
        item = item_bytes(str(plan.source.dtype))
        taken, put = (column_units(side, plan.unit, item) for side in (torch.from_numpy(pages), target))
        for from_, to in zip(taken, put, strict=True):
            to.numpy()[places, :, units[1] % plan.destination_units] = from_.numpy()[
                np.arange(len(pages)), :, units[0] % plan.source_units
            ]
        return None

    def _view(self, raw: RawTensor, shape: PageShape, offset: int, num_blocks: int) -> torch.Tensor:
        nbytes = (num_blocks - 1) * shape.block_stride + shape.nbytes
        return page_view(raw(offset, nbytes), shape, num_blocks)

    def _first_wrong(
        self,
        plan: PagePlan,
        taken: npt.NDArray[np.int8],
        source_units: npt.NDArray[np.int64],
        sums: RawTensor,
        first: int,
    ) -> int | None:
        """`taken`: int8 ``[layers, units, heads, unit, C]``, of the plan's unit, of the layers from `first` on."""
        heads, size, (layers, count) = plan.heads, granule_states(plan.source.num_states), taken.shape[:2]
        nbytes = layers * self._num_blocks[0] * plan.source.sums * WORD_NBYTES
        table = sums(self.leg.sum_offsets[first], nbytes).numpy().view(np.int64)
        table = table.reshape(layers, self._num_blocks[0], plan.source.num_heads, plan.source_units, -1).swapaxes(2, 3)
        expected = table[:, source_units // plan.source_units, source_units % plan.source_units]
        expected = expected[:, :, heads.source : heads.source + heads.count].reshape(layers * count, -1)
        words = taken.view(np.int64).reshape(layers * count, heads.count, plan.unit // size, -1)
        keys = self._all_keys(plan)
        # Where each block is one unit, all units have the same keys.
        keys = keys[0] if len(keys) == 1 else np.tile(keys[source_units % plan.source_units], (layers, 1, 1, 1))
        found = hash_words(words, keys.reshape(*keys.shape[:-3], heads.count, plan.unit // size, -1, 2))
        wrong = np.flatnonzero((found.reshape(expected.shape) != expected).any(1))
        return int(wrong[0]) % count if len(wrong) else None

    def _all_keys(self, plan: PagePlan) -> npt.NDArray[np.uint32]:
        """uint32 ``[units of a block, heads, unit * C, 2]``: the keys of the words of the slice."""
        if self._keys is None:
            self._keys = unit_keys(plan)
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
        while left > 0:
            part = next(self._parts, None)
            if part is None:
                return True
            leg, layers, ids = part
            if (wrong := self._work_off(leg, layers, ids)) is not None:
                self.problem = f"block {int(ids[0, wrong]) // leg.leg.plan.source_units}"
                return True
            left -= len(layers) * ids.shape[1] * leg.leg.plan.unit_nbytes
        return False

    def _work_off(self, leg: HostLeg, layers: range, ids: Ids) -> int | None:
        """Sum units of some layers, or convert those of one; the place in `ids` of one whose sum was wrong, or None."""
        if not self._as_is:
            return leg.convert(layers[0], self._source.raw, self._destination.raw, self._sums, ids)
        return leg.verify(layers, self._destination.raw, self._sums, ids) if self._sums is not None else None

    def _every_part(self, jobs: Sequence[tuple[HostLeg, Ids]]) -> Iterator[tuple[HostLeg, range, Ids]]:
        """What a step can do at once: units of one layer, or of several where a request has few blocks to sum."""
        for leg, ids in jobs:
            step, num_layers = units_in_step(leg.leg.plan), len(leg.leg.layers)
            together = max(1, step // ids.shape[1]) if self._as_is and leg.is_even else 1
            for layer in range(0, num_layers, together):
                for first in range(0, ids.shape[1], step):
                    yield leg, range(layer, min(layer + together, num_layers)), ids[:, first : first + step]


class HostSide:
    """A cache as bytes and as tensors, offsets from its base."""

    def __init__(self, address: int, nbytes: int, raw: RawTensor) -> None:
        self.bytes = bytes_at(address, nbytes)
        self.raw = raw
