"""A transfer on the host, in steps of a millisecond or so between which others can run.

Compiled kernels copy, and compare sums on the way, if there are any. Otherwise bytes that need no conversion are copied
by a loop over memoryview slices, the quickest way without a compiler: numpy's and torch's index operations took longer,
and memmove() by ctypes was no faster.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pdkv_connectors.ipc.columns import Ids
from pdkv_connectors.ipc.host_leg import HostLeg, HostSide
from pdkv_connectors.ipc.unit_kernel import UnitOffsets
from pdkv_connectors.native import streams

if TYPE_CHECKING:
    from pdkv.transfer.runs import Copies

STEP_NBYTES = 8 << 20
"""Bytes that one step copies, about a millisecond."""

WORK_STEP_NBYTES = 1 << 20
"""Bytes that one step sums or converts without kernels, about as long."""


def bytes_at(address: int, nbytes: int) -> memoryview:
    """The memory at an address, which somebody else keeps mapped."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


class Slices:
    """Bytes that are copied as they are, without kernels."""

    def __init__(self, copies: Copies, source: memoryview, destination: memoryview) -> None:
        self._source, self._destination = source, destination
        self._pieces = (
            (from_ + at, to + at, min(STEP_NBYTES, nbytes - at))
            for from_, to, nbytes in copies
            for at in range(0, nbytes, STEP_NBYTES)
        )

    def advance(self) -> bool:
        """Copy for a millisecond or so; whether that was all."""
        left = STEP_NBYTES
        for from_, to, nbytes in self._pieces:
            self._destination[to : to + nbytes] = self._source[from_ : from_ + nbytes]
            left -= nbytes
            if left <= 0:
                return False
        return True


class Part(NamedTuple):
    """What a step can do at once: units of one layer of a leg, or of several where a request has few blocks."""

    leg: HostLeg
    layers: range
    ids: Ids
    offsets: UnitOffsets | None  # where kernels move them

    @property
    def nbytes(self) -> int:
        return len(self.layers) * int(self.ids.shape[1]) * self.leg.leg.plan.unit_nbytes


class HostCopy:
    """One transfer: slices of memory, then sums; or units. Nothing moves but in :meth:`advance`."""

    def __init__(
        self,
        source: HostSide,
        destination: HostSide,
        sums: HostSide | None,
        slices: Slices | None,
        jobs: Sequence[tuple[HostLeg, Ids]],
    ) -> None:
        """
        Args:
            sums: the source's table of sums; None where nothing is to be verified.
            slices: of everything, where they copy bytes as they are and sums, if any, are compared afterwards.
            jobs: for each leg the units of the source and of the destination, int32 ``[2, units]``.
        """
        self._source, self._destination, self._sums = source, destination, sums
        self._slices = slices
        self._as_is = slices is not None
        whole = [Part(leg, range(len(leg.leg.layers)), ids, None) for leg, ids in jobs]
        self._streams = streams(sum(part.nbytes for part in whole))
        self._parts = self._every_part(jobs)
        #: The source's block whose sum was found wrong, once there is one.
        self.wrong_block: int | None = None

    def advance(self) -> bool:
        """Go on for a millisecond or so; whether everything is done. The memory of both sides must be there."""
        if self._slices is not None:
            if not self._slices.advance():
                return False
            self._slices = None
            return self._sums is None
        left = 1.0
        while left > 0:
            part = next(self._parts, None)
            if part is None:
                return True
            if (wrong := self._work_off(part)) is not None:
                self.wrong_block = int(part.ids[0, wrong]) // part.leg.leg.plan.source_units
                return True
            left -= part.nbytes / self._step_nbytes(part.leg)
        return False

    def _work_off(self, part: Part) -> int | None:
        """Move units, or sum them, or convert them; the place in its ids of one whose sum was wrong, or None."""
        leg, layers, ids, offsets = part
        if offsets is not None:
            return leg.move(layers, self._source, self._destination, self._sums, offsets, streams=self._streams)
        if not self._as_is:
            return leg.convert(layers[0], self._source, self._destination, self._sums, ids)
        return leg.verify(layers, self._destination, self._sums, ids) if self._sums is not None else None

    def _every_part(self, jobs: Sequence[tuple[HostLeg, Ids]]) -> Iterator[Part]:
        for leg, ids in jobs:
            step, num_layers = max(1, self._step_nbytes(leg) // leg.leg.plan.unit_nbytes), len(leg.leg.layers)
            joins = leg.is_even if self._as_is else leg.is_compiled
            together = max(1, step // ids.shape[1]) if joins else 1
            for first in range(0, ids.shape[1], step):
                now = ids[:, first : first + step]
                offsets = leg.offsets(now) if self._moves(leg) else None
                for layer in range(0, num_layers, together):
                    yield Part(leg, range(layer, min(layer + together, num_layers)), now, offsets)

    def _moves(self, leg: HostLeg) -> bool:
        """Whether kernels move units of the leg to where they belong."""
        return leg.is_compiled and not self._as_is

    def _step_nbytes(self, leg: HostLeg) -> int:
        return STEP_NBYTES if self._moves(leg) else WORK_STEP_NBYTES
