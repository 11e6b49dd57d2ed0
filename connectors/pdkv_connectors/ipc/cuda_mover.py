"""Copies, conversions and sums on a GPU: one launch for all layers and blocks of a request."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.transfer.blocks import MAX_GROUPS
from pdkv_connectors.ipc.compiled import SUM_WARPS, CompiledKernel, Launch
from pdkv_connectors.ipc.constants import (
    BESIDE_OTHERS,
    WHOLE_DEVICE,
    Constants,
    copy_constants,
    copy_warps,
    sum_constants,
)
from pdkv_connectors.ipc.cuda_calls import CudaCalls
from pdkv_connectors.ipc.hashing import WORD_NBYTES, key_table
from pdkv_connectors.ipc.legs import LayerPlace, Leg

Ids = npt.NDArray[np.int32]

COPY_ARGUMENTS = {
    "pointers": "*i64", "ids": "*i32", "keys": "*i64", "inverses": "*fp32", "fault": "*i32", "units": "i32",
    "first_source": "i32", "first_target": "i32",
}  # fmt: skip
SUM_ARGUMENTS = {"pointers": "*i64", "ids": "*i32", "keys": "*i64", "blocks": "i32"}
_MAX_PROGRAMS = 2**31 - 1  # of a grid's first axis
_ID_NBYTES = 4
_MIN_IDS = 16_384
_FAULT_NBYTES = 4


class CudaMover:
    """Launches kernels of one device on a stream of its own. From one thread at a time."""

    def __init__(self, device: int) -> None:
        """
        Args:
            device: ordinal as torch counts it.

        Raises:
            TransportError: the device cannot be used.
        """
        self.calls = CudaCalls(device)
        with self.calls.on_device():
            self.stream = self.calls.new_stream()
        self._kernels: dict[tuple[Any, ...], CompiledKernel] = {}
        self._keys: dict[int, int] = {}
        self._spare: list[_Slot] = []
        self._slots: list[_Slot] = []

    def copy_leg(
        self, leg: Leg, source: int, destination: int, sums: int | None, inverses: Sequence[tuple[float, float]]
    ) -> CopyLeg:
        """Make a leg ready: compile, for the whole device and for few programs, and put its tables onto the device.

        Args:
            source, destination, sums: addresses of both caches' bases and of the source's table of sums; without the
                last one nothing is verified.
            inverses: 1 / scale of K and of V for each layer of the leg; used where the plan quantizes.
        """
        plan = leg.plan
        sources = [source + offset + plan.first_source_byte for offset in leg.source_offsets]
        destinations = [destination + offset + plan.first_destination_byte for offset in leg.destination_offsets]
        first_sum = plan.heads.source * plan.source.granules * WORD_NBYTES
        tables = [(sums or 0) + offset + first_sum for offset in leg.sum_offsets]
        align = plan.alignment(*sources, *destinations)
        verify = sums is not None
        launches = []
        with self.calls.on_device():
            from pdkv_connectors.ipc.kernels import copy_pages

            pointers = self.calls.upload(struct.pack(f"{3 * len(sources)}q", *sources, *destinations, *tables))
            scales = self.calls.upload(np.asarray(inverses, np.float32).tobytes())
            for tiling in (WHOLE_DEVICE, BESIDE_OTHERS):
                constants = copy_constants(plan, len(sources), align, verify=verify, tiling=tiling)
                warps = copy_warps(constants, tiling)
                launch = Launch(self.calls, self._compiled(copy_pages, COPY_ARGUMENTS, constants, warps))
                launch.values[0].value = pointers
                launch.values[2].value = self._key_table(plan.source.nbytes)
                launch.values[3].value = scales
                launches.append(launch)
        return CopyLeg(launches[0], launches[1], len(sources), plan.unit_nbytes * len(sources), (pointers, scales))

    def sum_leg(self, places: Sequence[LayerPlace], base: int, sums: int) -> SumLeg:
        """Make the summing of layers of one shape ready. `base`, `sums`: addresses of the cache and of its table."""
        shape = places[0].shape
        pages = [base + place.offset for place in places]
        tables = [sums + place.sum_offset for place in places]
        constants = sum_constants(
            shape, len(pages), align_of(shape.block_stride, shape.head_stride, shape.state_stride, *pages)
        )
        with self.calls.on_device():
            from pdkv_connectors.ipc.kernels import sum_pages

            launch = Launch(self.calls, self._compiled(sum_pages, SUM_ARGUMENTS, constants, SUM_WARPS))
            pointers = self.calls.upload(struct.pack(f"{2 * len(pages)}q", *pages, *tables))
            launch.values[0].value = pointers
            launch.values[2].value = self._key_table(shape.nbytes)
        return SumLeg(launch, len(pages) * shape.sums, (pointers,))

    def start_copy(self, jobs: Sequence[tuple[Sequence[CopyLeg], Ids, Ids]], programs: int | None) -> CudaWork:
        """Copy: for each KV-cache group its legs, the source's units and the destination's.

        Args:
            programs: so many at most, to leave the device to others; None for all that it takes.
        """
        slot = self._take(2 * sum([len(source) for _, source, _ in jobs]))
        calls, stream = self.calls, self.stream
        with calls.on_device():
            # Of a single unit the ids are arguments: a copy of them would take as long as all else.
            listed = [part for _, *parts in jobs if len(parts[0]) > 1 for part in parts]
            position = slot.put(listed, stream) if listed else 0
            for number, (legs, source, destination) in enumerate(jobs):
                units, first_source, first_target = len(source), int(source[0]), int(destination[0])
                slot.faults[number] = 0
                for leg in legs:
                    launch = leg.launch if programs is None else leg.throttled
                    values = launch.values
                    values[1].value = position
                    values[4].value = slot.device_faults + number * _FAULT_NBYTES
                    values[5].value = units
                    values[6].value = first_source
                    values[7].value = first_target
                    wanted = min(units * leg.layers, _MAX_PROGRAMS)
                    launch(wanted if programs is None else min(wanted, programs), stream)
                position += 2 * units * _ID_NBYTES if units > 1 else 0
            if code := calls.record(slot.event, stream):
                calls.require(code, "cuEventRecord")
        return CudaWork(self, slot, len(jobs))

    def start_sums(self, jobs: Sequence[tuple[Sequence[SumLeg], Ids]], after: int | None = None) -> CudaWork:
        """Sum blocks: for each KV-cache group its legs and block ids. `after`: an event to wait for on the device."""
        slot = self._take(sum([len(part) for _, part in jobs]))
        calls, stream = self.calls, self.stream
        with calls.on_device():
            if after is not None:
                calls.check("cuStreamWaitEvent", stream, after, 0)
            position = slot.put([part for _, part in jobs], stream)
            for legs, blocks in jobs:
                for leg in legs:
                    leg.launch.values[1].value = position
                    leg.launch.values[3].value = len(blocks)
                    leg.launch(min(len(blocks) * leg.items, _MAX_PROGRAMS), stream)
                position += len(blocks) * _ID_NBYTES
            calls.require(calls.record(slot.event, stream), "cuEventRecord")
        return CudaWork(self, slot, 0)

    def drain(self) -> None:
        """Wait until all that was started has ended. From any thread."""
        if self.stream:
            with self.calls.on_device():
                self.calls.check("cuStreamSynchronize", self.stream)

    def synchronize_device(self) -> None:
        """Wait for all work of this process on the device. From any thread."""
        with self.calls.on_device():
            self.calls.check("cuCtxSynchronize")

    def free(self, legs: Sequence[CopyLeg | SumLeg]) -> None:
        """Give back the tables of legs that nothing uses any more."""
        with self.calls.on_device():
            for leg in legs:
                for address in leg.tables:
                    self.calls.free(address)

    def close(self) -> None:
        """Let go of everything, once what still runs has ended. Idempotent."""
        if not self.stream:
            return
        self.drain()
        with self.calls.on_device():
            for slot in self._slots:
                slot.close()
            for address in self._keys.values():
                self.calls.free(address)
            for kernel in self._kernels.values():
                kernel.close()
            self.calls.check("cuStreamDestroy_v2", self.stream)
        self.stream = 0
        self.calls.close()

    def give_back(self, slot: _Slot) -> None:
        """The work of a slot has ended."""
        self._spare.append(slot)

    def _take(self, num_ids: int) -> _Slot:
        for index, slot in enumerate(self._spare):
            if slot.capacity >= num_ids:
                return self._spare.pop(index)
        with self.calls.on_device():
            slot = _Slot(self.calls, max(num_ids, _MIN_IDS))
        self._slots.append(slot)
        return slot

    def _compiled(self, kernel: Any, arguments: dict[str, str], constants: Constants, warps: int) -> CompiledKernel:
        key = (kernel.__name__, warps, *constants.values())
        if key not in self._kernels:
            self._kernels[key] = CompiledKernel(self.calls, kernel, arguments, constants, warps)
        return self._kernels[key]

    def _key_table(self, page_nbytes: int) -> int:
        table = key_table(page_nbytes // WORD_NBYTES)
        if len(table) not in self._keys:
            self._keys[len(table)] = self.calls.upload(struct.pack(f"{len(table)}q", *table))
        return self._keys[len(table)]


def align_of(*numbers: int) -> int:
    """The widest access in bytes, at most 16, that divides all numbers."""
    return int(np.gcd.reduce([16, *numbers]))


@dataclass
class CopyLeg:
    """A leg on the device: launches, layers, bytes of one unit in all layers, tables to free."""

    launch: Launch
    throttled: Launch
    layers: int
    unit_nbytes: int
    tables: tuple[int, ...]


@dataclass
class SumLeg:
    """Summing on the device: launch, sums of one block in all layers, tables to free."""

    launch: Launch
    items: int
    tables: tuple[int, ...]


class _Slot:
    """What one piece of work needs: room for ids on the device, words for faults that both sides see, an event."""

    def __init__(self, calls: CudaCalls, capacity: int) -> None:
        self.capacity = capacity
        self._calls = calls
        self._ids = calls.allocate(capacity * _ID_NBYTES)
        self._shared, address = calls.allocate_shared(MAX_GROUPS * _FAULT_NBYTES)
        self.device_faults = address
        self.faults = (ctypes.c_int32 * MAX_GROUPS).from_address(self._shared)
        self._staged = np.empty(capacity, np.int32)
        #: Asking numpy for it anew would take a microsecond each time.
        self._staged_address = int(self._staged.ctypes.data)
        self.event = calls.new_event()

    def put(self, parts: Sequence[Ids], stream: int) -> int:
        """Put ids, one part after the other, to where a kernel of the stream finds them; returns that address."""
        position = 0
        for part in parts:
            end = position + len(part)
            self._staged[position:end] = part
            position = end
        nbytes = position * _ID_NBYTES
        # Pageable memory: the driver has taken what is in it when the call returns.
        if nbytes and (code := self._calls.copy_to_device(self._ids, self._staged_address, nbytes, stream)):
            self._calls.require(code, "cuMemcpyHtoDAsync_v2")
        return self._ids

    def close(self) -> None:
        self._calls.free(self._ids)
        self._calls.free_shared(self._shared)
        self._calls.check("cuEventDestroy_v2", self.event)


class CudaWork:
    """One launch, or one for each KV-cache group."""

    def __init__(self, mover: CudaMover, slot: _Slot, groups: int) -> None:
        self._mover = mover
        self._slot: _Slot | None = slot
        self._groups = groups
        #: (group's place among the jobs, unit's place among its ids) whose sum was wrong, once done.
        self.fault: tuple[int, int] | None = None

    def is_done(self) -> bool:
        """Whether it has ended; never waits.

        Raises:
            TransportError: the device failed.
        """
        slot = self._slot
        if slot is None:
            return True
        if not self._mover.calls.has_happened(slot.event):
            return False
        for number in range(self._groups):
            if slot.faults[number]:
                self.fault = (number, slot.faults[number] - 1)
        self._slot = None
        self._mover.give_back(slot)
        return True
