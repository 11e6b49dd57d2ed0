"""P's table of sums: what its pages hash to, written when they are complete, read by whoever copies them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdkv.errors import ProtocolError, TransportError
from pdkv.kvcache.config import round_up
from pdkv.memory import Piece, Reservation
from pdkv_connectors.ipc.columns import Ids
from pdkv_connectors.ipc.hashing import WORD_NBYTES
from pdkv_connectors.ipc.legs import LayerPlace, layer_places, sums_nbytes
from pdkv_connectors.ipc.owner import GrantedMemory

if TYPE_CHECKING:
    import torch

    from pdkv.kvcache import GrowableKVCache
    from pdkv.transfer.geometry import CacheGeometry
    from pdkv_connectors.ipc.cuda_mover import CudaMover, CudaWork, SumLeg
    from pdkv_connectors.ipc.plan import PageShape
    from pdkv_connectors.ipc.unit_kernel import UnitKernel
    from pdkv_connectors.native import Kernels

STEP_NBYTES = 8 << 20
"""Summed at once on the host, in a millisecond by a kernel and a few without. Without, blocks that do not follow each
other are copied for it."""


class PageSums:
    """Sums of the committed blocks of a cache, ``[layer][block][H][N / G]``, in memory of the same kind as the cache.

    Args:
        mover: on CUDA; used under this object's lock only.
        kernels: for the host; without them numpy sums.
    """

    def __init__(
        self, cache: GrowableKVCache, geometry: CacheGeometry, mover: CudaMover | None, kernels: Kernels | None
    ) -> None:
        self._cache = cache
        self._geometry = geometry
        self._mover = mover
        self._kernels = kernels
        self._lock = threading.Lock()
        self._closed = False
        self._reservation = Reservation(cache.driver, round_up(sums_nbytes(geometry), cache.driver.granule))
        self._places = [[place for place in layer_places(geometry) if place.group == group] for group in self._groups]
        self._legs: list[list[SumLeg]] = []
        try:
            self._reservation.add([Piece(0, self._reservation.nbytes)])
            if mover is not None:
                self._legs = [self._device_legs(mover, places) for places in self._places]
        except BaseException:
            self._reservation.close()
            raise
        self._keys: dict[PageShape, npt.NDArray[np.uint32]] = {}
        self._unit_kernels: dict[PageShape, UnitKernel] = {}

    def export(self) -> GrantedMemory:
        """For a peer to read."""
        return GrantedMemory(self._reservation.nbytes, self._reservation.export_fds())

    def start(self, group: int, blocks: Ids, after: int | None = None) -> CudaWork | None:
        """Sum blocks of a group. On the host that is done when it returns.

        Args:
            after: on CUDA, an event that the device waits for first.

        Raises:
            ProtocolError: there is no such group or block.
            TransportError: closed, also while it sums.
        """
        if not 0 <= group < len(self._places):
            raise ProtocolError(f"KV-cache group {group} was offered, but there are {len(self._places)}.")
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self._geometry.num_blocks:
            raise ProtocolError(f"blocks were offered that are not among the {self._geometry.num_blocks} committed.")
        with self._lock:
            self._require_open()
            if self._mover is not None:
                return self._mover.start_sums([(self._legs[group], blocks)], after)
            for shape, places in groupby(self._places[group], lambda place: place.shape):
                if self._kernels is not None:
                    self._sum_by_kernel(self._kernels, shape, list(places), blocks)
                    continue
                for place in places:
                    self._sum_by_numpy(place, blocks)
            return None

    def is_done(self, work: CudaWork | None) -> bool:
        """Whether what :meth:`start` began has ended. Raises TransportError where this is closed."""
        if work is None:
            return True
        with self._lock:
            self._require_open()
            return work.is_done()

    def of_pages(self, group: int, blocks: Ids) -> npt.NDArray[np.uint64]:
        """uint64 ``[blocks, layers of the group]``: what whole pages hash to, as :meth:`start` has written it down.

        Raises:
            TransportError: closed.
        """
        import torch

        with self._lock:
            self._require_open()
            rows = torch.from_numpy(blocks.astype(np.int64))
            columns = []
            for shape, places in groupby(self._places[group], lambda place: place.shape):
                alike = list(places)  # they follow each other in the table too
                table = self._table(alike[0].sum_offset, len(alike) * self._geometry.num_blocks * shape.sums)
                table = table.view(len(alike), self._geometry.num_blocks, shape.sums)
                columns.append(table[:, rows.to(table.device)].sum(2).T)
            return torch.cat(columns, dim=1).cpu().contiguous().numpy().view(np.uint64)

    def close(self) -> None:
        """Give the memory back, when nothing sums any more: peers are answered by another thread. Idempotent."""
        self._closed = True  # what sums on the host ends at its next step
        with self._lock:
            if self._mover is not None and self._legs:
                self._mover.drain()
                self._mover.free([leg for legs in self._legs for leg in legs])
            self._legs = []
            self._reservation.close()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError("the memory is being taken back, so its blocks are not summed; handshake again.")

    @property
    def _groups(self) -> range:
        return range(len(self._geometry.groups))

    def _device_legs(self, mover: CudaMover, places: Sequence[LayerPlace]) -> list[SumLeg]:
        shapes = dict.fromkeys(place.shape for place in places)
        base, table = self._cache.address, self._reservation.address
        return [mover.sum_leg([place for place in places if place.shape == shape], base, table) for shape in shapes]

    def _table(self, offset: int, sums: int) -> torch.Tensor:
        """int64 ``[sums]`` from a byte of the table on."""
        import torch

        return self._reservation.tensor(offset, sums * WORD_NBYTES).view(torch.int64)

    def _sum_by_kernel(self, kernels: Kernels, shape: PageShape, places: Sequence[LayerPlace], blocks: Ids) -> None:
        from pdkv_connectors.ipc.unit_kernel import UnitKernel, whole_pages

        if shape not in self._unit_kernels:
            self._unit_kernels[shape] = UnitKernel(whole_pages(shape), kernels)
        kernel = self._unit_kernels[shape]
        pages = np.array([self._cache.address + place.offset for place in places], np.int64)
        sums = np.array([self._reservation.address + place.sum_offset for place in places], np.int64)
        # As many layers as a step takes together: a request often has few blocks.
        step = max(1, STEP_NBYTES // shape.nbytes)
        together = max(1, step // max(len(blocks), 1))
        for first in range(0, len(blocks), step):
            now = blocks[first : first + step]
            offsets = kernel.offsets(now, now)
            for layer in range(0, len(places), together):
                layers = slice(layer, layer + together)
                self._require_open()
                kernel.sum(pages[layers], sums[layers], offsets)

    def _sum_by_numpy(self, place: LayerPlace, blocks: Ids) -> None:
        from pdkv_connectors.ipc.convert import page_keys, page_view
        from pdkv_connectors.ipc.hashing import hash_granules

        shape, num_blocks = place.shape, self._geometry.num_blocks
        if shape not in self._keys:
            self._keys[shape] = page_keys(shape)
        # Indexed by numpy: torch shares an index operation out to threads, which wait for each other on a busy machine.
        pages = page_view(self._cache.raw_tensor(), shape, num_blocks, place.offset).numpy().view(np.int64)
        table = self._table(place.sum_offset, num_blocks * shape.sums).numpy()
        table = table.reshape(num_blocks, shape.num_heads, shape.granules)
        step = max(1, STEP_NBYTES // shape.nbytes)
        for first in range(0, len(blocks), step):
            self._require_open()
            now = _as_slice(blocks[first : first + step])
            table[now] = hash_granules(pages[now], self._keys[shape])


def _as_slice(blocks: Ids) -> slice | Ids:
    """The same blocks in a form that copies nothing, where they follow each other."""
    first, last = int(blocks[0]), int(blocks[-1])
    in_order = last - first == len(blocks) - 1 and bool((np.diff(blocks) == 1).all())
    return slice(first, last + 1) if in_order else blocks
