"""Units of pages on the host as the compiled kernels take them: what a plan means in addresses and strides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pdkv.transfer.shards import HeadSlice
from pdkv_connectors.ipc.hashing import WORD_NBYTES, granule_states, word_keys
from pdkv_connectors.ipc.plan import PagePlan, PageShape

if TYPE_CHECKING:
    from pdkv_connectors.native import Kernels, Numbers, UnitShape

Units = npt.NDArray[np.integer[Any]]

LINE_NBYTES = 64
LONG_ROW_NBYTES = 1024
"""Of rows as long as that, what is not a whole line at either end costs little."""


@dataclass(frozen=True, slots=True)
class UnitOffsets:
    """Where units lie, in bytes from a layer's block 0, its first sum, and the first key: int64 ``[units]`` each."""

    source: Numbers
    destination: Numbers
    keys: Numbers
    sums: Numbers


class UnitKernel:
    """Copies units as a plan says, bytes as they are, or sums them. Addresses are of block 0 (or its first sum) of each
    layer, int64 ``[layers]``.

    Args:
        plan: one that neither quantizes nor cuts columns, of pages of words (:func:`legs.require_words`).
    """

    def __init__(self, plan: PagePlan, kernels: Kernels) -> None:
        self._plan = plan
        self._kernels = kernels
        shape = unit_shape(plan)
        self._shape, self._copied_shape = shape.numbers(), shape.numbers(sums=False)
        #: Streaming writes whole lines: short rows that begin or end within lines are written through the caches.
        self._may_stream = int(self._copied_shape[-1]) >= LONG_ROW_NBYTES or all(
            nbytes % LINE_NBYTES == 0
            for nbytes in (shape.nbytes, shape.to_row, shape.to_granule, shape.to_head, plan.destination.block_stride)
        )
        self._keys = np.ascontiguousarray(word_keys(plan.source.nbytes // WORD_NBYTES))

    def offsets(self, source_units: Units, destination_units: Units) -> UnitOffsets:
        """Where units are copied from and to.

        Args:
            source_units, destination_units: ``[units]``, ``block * units of a block + unit`` of either side.
        """
        plan, source, target = self._plan, self._plan.source, self._plan.destination
        blocks, unit = _split(source_units, plan.source_units)
        to_blocks, to_unit = _split(destination_units, plan.destination_units)
        in_page = unit * (plan.unit * source.state_stride) + plan.first_source_byte
        to_in_page = to_unit * (plan.unit * target.state_stride) + plan.first_destination_byte
        # The table is [block][H][N / G], and keys lie as the words of a page do.
        in_sums = unit * (plan.unit // granule_states(source.num_states)) + plan.heads.source * source.granules
        return UnitOffsets(
            blocks * source.block_stride + in_page,
            to_blocks * target.block_stride + to_in_page,
            np.full(len(blocks), in_page) if isinstance(in_page, int) else in_page,
            blocks * (source.sums * WORD_NBYTES) + in_sums * WORD_NBYTES,
        )

    def copy(self, source: Numbers, destination: Numbers, units: UnitOffsets, *, streams: bool) -> None:
        """Copy units in every layer.

        Args:
            streams: write past the caches, where rows are whole lines.
        """
        from_, to = _of_layers(source, units.source), _of_layers(destination, units.destination)
        self._kernels.copy_units(to, from_, self._copied_shape, streams=streams and self._may_stream)

    def copy_and_check(
        self, source: Numbers, destination: Numbers, sums: Numbers, units: UnitOffsets, *, streams: bool
    ) -> int | None:
        """The same, and compare what is written with the source's table of sums.

        Returns:
            The place in `units` of one that differs, after which nothing is copied; None where none does.
        """
        from_, to = _of_layers(source, units.source), _of_layers(destination, units.destination)
        keys, table = self._keys_of(units, len(sums)), _of_layers(sums, units.sums)
        wrong = self._kernels.copy_and_check_units(
            to, from_, keys, table, self._shape, streams=streams and self._may_stream
        )
        return None if wrong is None else wrong % len(units.source)

    def sum(self, source: Numbers, sums: Numbers, units: UnitOffsets) -> None:
        """Write the sums of units of the source, in every layer, to its table."""
        from_, keys = _of_layers(source, units.source), self._keys_of(units, len(sums))
        self._kernels.sum_units(from_, keys, _of_layers(sums, units.sums), self._shape)

    def _keys_of(self, units: UnitOffsets, layers: int) -> Numbers:
        return _of_layers(np.full(layers, self._keys.ctypes.data, np.int64), units.keys)


def unit_shape(plan: PagePlan) -> UnitShape:
    """The units of a plan; granules are those of the source. What is only copied needs none."""
    from pdkv_connectors.native import UnitShape

    source, target = plan.source, plan.destination
    rows = granule_states(source.num_states)
    if plan.unit % rows:
        rows = plan.unit  # a plan that cannot be verified
    return UnitShape(
        heads=plan.heads.count,
        from_head=source.head_stride,
        to_head=target.head_stride,
        table_head=source.granules * WORD_NBYTES,
        granules=plan.unit // rows,
        from_granule=rows * source.state_stride,
        to_granule=rows * target.state_stride,
        rows=rows,
        from_row=source.state_stride,
        to_row=target.state_stride,
        nbytes=source.content_bytes,
    )


def whole_pages(shape: PageShape) -> PagePlan:
    """The plan of pages that are only summed."""
    return PagePlan(shape, shape, HeadSlice(shape.num_heads), shape.num_states, quantize=False)


def taken_pages(plan: PagePlan) -> PagePlan:
    """The plan that takes units out of the source into an array ``[units, heads, unit, C]``."""
    count, content = plan.heads.count, plan.source.content_bytes
    array = PageShape(
        count, plan.unit, content, plan.unit * content, content, count * plan.unit * content, plan.source.dtype
    )
    return PagePlan(plan.source, array, HeadSlice(count, source=plan.heads.source), plan.unit, quantize=False)


def _split(ids: Units, units: int) -> tuple[Numbers, Numbers | int]:
    """The block of each unit, and its place there: 0, without dividing, where a block is one unit."""
    if units == 1:
        return ids.astype(np.int64), 0
    return np.divmod(ids.astype(np.int64), units)


def _of_layers(bases: Numbers, offsets: Numbers) -> Numbers:
    """``[layers * units]``, layer by layer."""
    places: Numbers = np.add.outer(bases, offsets).ravel()
    return places
