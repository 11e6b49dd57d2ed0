"""Copies, conversions and sums of the pages of one leg on the host.

Where there are compiled kernels they move bytes and compare sums in one go; numpy, which is what they must equal, takes
their place where there are none, and does what they do not: other element types, and pages of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pdkv.kvcache.specs import item_bytes
from pdkv_connectors.ipc.columns import Ids
from pdkv_connectors.ipc.convert import column_units, copy_units, page_keys, page_view, take_units, unit_view
from pdkv_connectors.ipc.hashing import WORD_NBYTES, granule_states, hash_words
from pdkv_connectors.ipc.legs import Leg
from pdkv_connectors.ipc.plan import PagePlan, PageShape
from pdkv_connectors.ipc.unit_kernel import UnitKernel, UnitOffsets, taken_pages

if TYPE_CHECKING:
    from pdkv_connectors.native import Kernels, Numbers

RawTensor = Callable[[int, int], torch.Tensor]
"""int8 over (offset, nbytes) of a memory."""

Units = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostSide:
    """A memory by its address, which somebody else keeps mapped, and as tensors; offsets from its base."""

    address: int
    raw: RawTensor

    def places(self, offsets: Sequence[int]) -> Numbers:
        """Addresses."""
        return np.array(offsets, np.int64) + self.address


class HostLeg:
    """A leg over two memories of the host.

    Attributes:
        is_even: whether layers follow each other at equal steps, so that numpy sums many as one.
        is_compiled: whether kernels take units from their places to their places.
    """

    def __init__(
        self,
        leg: Leg,
        num_blocks: tuple[int, int],
        inverses: Sequence[tuple[float, float]],
        kernels: Kernels | None = None,
    ) -> None:
        """
        Args:
            num_blocks: committed blocks of source and destination.
            inverses: 1 / scale of K and of V for each layer of the leg.
        """
        self.leg = leg
        self._num_blocks = num_blocks
        self._inverses = inverses
        self._keys: npt.NDArray[np.uint32] | None = None
        self._offsets = np.array((leg.source_offsets, leg.destination_offsets, leg.sum_offsets), np.int64)
        steps = {
            (b - a, d - c) for (a, c), (b, d) in pairwise(zip(leg.destination_offsets, leg.sum_offsets, strict=True))
        }
        sums_nbytes = num_blocks[0] * leg.plan.source.sums * WORD_NBYTES
        self.is_even = len(steps) <= 1 and all(step >= 0 and apart == sums_nbytes for step, apart in steps)
        #: What is taken out of the source at once: of pages of columns the whole, since a unit is spread over its page.
        self._taken = replace(leg.plan, unit=leg.plan.source.num_states) if leg.plan.cuts_columns else leg.plan
        self.is_compiled = kernels is not None and not (leg.plan.quantize or leg.plan.cuts_columns)
        self._kernel: UnitKernel | None = None
        if kernels is not None:
            self._kernel = UnitKernel(leg.plan if self.is_compiled else taken_pages(self._taken), kernels)

    def move(
        self,
        layers: range,
        source: HostSide,
        destination: HostSide,
        sums: HostSide | None,
        units: UnitOffsets,
        *,
        streams: bool,
    ) -> int | None:
        """Copy units by the kernel; the place in `units` of one whose sum was wrong, or None.

        Each word is hashed and written from where it was read to: what is checked and what is written are the same.
        Where a unit is wrong, it and others have been written all the same, to blocks that their request then does not
        get.
        """
        from_, to, table = self._offsets[:, layers.start : layers.stop]
        from_, to = from_ + source.address, to + destination.address
        if sums is None:
            self._compiled.copy(from_, to, units, streams=streams)
            return None
        return self._compiled.copy_and_check(from_, to, table + sums.address, units, streams=streams)

    def offsets(self, ids: Ids) -> UnitOffsets:
        """What :meth:`move` takes, for the units of the source and of the destination, int32 ``[2, units]``."""
        return self._compiled.offsets(ids[0], ids[1])

    @property
    def _compiled(self) -> UnitKernel:
        if self._kernel is None or not self.is_compiled:
            raise RuntimeError("no kernel moves these units; convert() does")
        return self._kernel

    def convert(
        self, layer: int, source: HostSide, destination: HostSide, sums: HostSide | None, ids: Ids
    ) -> int | None:
        """Copy units of one layer, converting them; the place in `ids` of a unit whose sum was wrong, or None.

        What is summed is a copy: what is checked and what is written then are the same bytes.
        """
        plan = self.leg.plan
        units = ids.reshape(2, -1).astype(np.int64)
        target = self._view(destination, plan.destination, self.leg.destination_offsets[layer], self._num_blocks[1])
        wanted = units[0] // plan.source_units if plan.cuts_columns else units[0]
        taken, wrong = self._take(layer, source, sums, wanted)
        if wrong is not None:
            return wrong
        if plan.cuts_columns:
            self._put_columns(taken, target, units)
        else:
            copy_units(plan, taken, target, units[1], self._inverses[layer])
        return None

    def verify(self, layers: range, destination: HostSide, sums: HostSide, ids: Ids) -> int | None:
        """The place in `ids` of a unit that was copied as it is, and whose sum is wrong; None where all are right.

        Args:
            layers: one, or several where the leg :attr:`is_even`.
        """
        plan, heads, shape = self.leg.plan, self.leg.plan.heads, self.leg.plan.destination
        units = ids.reshape(2, -1).astype(np.int64)
        first, last = (self.leg.destination_offsets[layer] for layer in (layers[0], layers[-1]))
        nbytes = last - first + (self._num_blocks[1] - 1) * shape.block_stride + shape.nbytes
        pages = np.lib.stride_tricks.as_strided(
            destination.raw(first, nbytes).numpy()[heads.destination * shape.head_stride :],
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
        return self._first_wrong(np.ascontiguousarray(taken), units[0], sums, layers[0])

    def _take(
        self, layer: int, source: HostSide, sums: HostSide | None, units: Units
    ) -> tuple[npt.NDArray[np.int8], int | None]:
        """A copy of units of one layer, int8 ``[units, heads, unit, C]``, and the place of one whose sum is wrong."""
        plan, offset = self._taken, self.leg.source_offsets[layer]
        if self._kernel is None:
            view = self._view(source, plan.source, offset, self._num_blocks[0])
            taken = take_units(unit_view(view, plan.unit, plan.heads.source, plan.heads.count), units)
            return taken, self._first_wrong(taken[None], units, sums, layer) if sums is not None else None
        taken = np.empty((len(units), plan.heads.count, plan.unit, plan.source.content_bytes), np.int8)
        places = source.places([offset]), np.array([taken.ctypes.data], np.int64)
        offsets = self._kernel.offsets(units, np.arange(len(units)))
        if sums is None:
            self._kernel.copy(*places, offsets, streams=False)
            return taken, None
        table = sums.places([self.leg.sum_offsets[layer]])
        return taken, self._kernel.copy_and_check(*places, table, offsets, streams=False)

    def _put_columns(self, pages: npt.NDArray[np.int8], target: torch.Tensor, units: Units) -> None:
        """Write units of whole pages, as :meth:`_take` gave them, to their places."""
        plan, heads = self.leg.plan, self.leg.plan.heads
        target = target.narrow(1, heads.destination, heads.count)
        item = item_bytes(str(plan.source.dtype))
        taken, put = (column_units(side, plan.unit, item) for side in (torch.from_numpy(pages), target))
        for from_, to in zip(taken, put, strict=True):
            to.numpy()[units[1] // plan.destination_units, :, units[1] % plan.destination_units] = from_.numpy()[
                np.arange(len(pages)), :, units[0] % plan.source_units
            ]

    def _view(self, side: HostSide, shape: PageShape, offset: int, num_blocks: int) -> torch.Tensor:
        nbytes = (num_blocks - 1) * shape.block_stride + shape.nbytes
        return page_view(side.raw(offset, nbytes), shape, num_blocks)

    def _first_wrong(self, taken: npt.NDArray[np.int8], source_units: Units, sums: HostSide, first: int) -> int | None:
        """`taken`: int8 ``[layers, units, heads, unit, C]``, of the layers from `first` on."""
        plan, heads = self._taken, self._taken.heads
        size, (layers, count) = granule_states(plan.source.num_states), taken.shape[:2]
        nbytes = layers * self._num_blocks[0] * plan.source.sums * WORD_NBYTES
        table = sums.raw(self.leg.sum_offsets[first], nbytes).numpy().view(np.int64)
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
