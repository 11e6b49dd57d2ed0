"""Which of P's blocks are complete and summed, for D to see without asking: a mark for each block, in shared memory.

A mark is 0 where a block is not to be read as it is. Else it is another one each time that P has taken the block back,
so that D can tell whether that has happened under a READ.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from pdkv.kvcache.config import round_up
from pdkv.memory import HostDriver, ImportedMemory, Piece, Reservation
from pdkv_connectors.ipc.columns import Ids
from pdkv_connectors.ipc.host_mover import bytes_at
from pdkv_connectors.ipc.owner import GrantedMemory

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_NUM_MARKS = 255  # that a byte has beside 0

Marks = list[int] | npt.NDArray[np.uint8]


class Board:
    """P's side: writes."""

    def __init__(self, num_blocks: int) -> None:
        self._driver = HostDriver(_PAGE_NBYTES)
        self._reservation = Reservation(self._driver, round_up(num_blocks, _PAGE_NBYTES))
        self._reservation.add([Piece(0, self._reservation.nbytes)])
        self._marks: npt.NDArray[np.uint8] | None = np.frombuffer(
            bytes_at(self._reservation.address, num_blocks), np.uint8
        )
        self._next = np.ones(num_blocks, np.uint8)

    def set(self, blocks: Ids, ready: bool) -> None:
        """Say whether blocks may be read as they are."""
        if self._marks is None:
            return
        if not ready:
            self._next[blocks] = self._next[blocks] % _NUM_MARKS + 1
        self._marks[blocks] = self._next[blocks] if ready else 0

    def are_set(self, blocks: Ids) -> npt.NDArray[np.bool_]:
        """bool ``[blocks]``: whether each may be read as it is; none once this is closed."""
        marks = self._marks
        return np.zeros(len(blocks), np.bool_) if marks is None else marks[blocks].astype(np.bool_)

    def export(self) -> GrantedMemory:
        """For a peer to read."""
        return GrantedMemory(self._reservation.nbytes, self._reservation.export_fds())

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._marks = None
        self._reservation.close()
        self._driver.close()


class PeerBoard:
    """D's side: looks. To be used as long as `memory` is open."""

    def __init__(self, memory: ImportedMemory, num_blocks: int) -> None:
        self._bytes = bytes_at(memory.address, num_blocks)
        self._marks = np.frombuffer(self._bytes, np.uint8)

    def marks(self, ids: Ids | list[int], units: int) -> Marks:
        """Those of blocks, as they are now.

        Args:
            ids: of units; a list where they are few.
            units: units of a block.
        """
        if isinstance(ids, list):
            marks = self._bytes
            return [marks[number // units] for number in ids]
        return self._marks[ids if units == 1 else ids // units]
