"""What an owner has said to be complete, and the sums of it: the bookkeeping of every transport that keeps sums."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdkv.errors import ProtocolError, TransportError
from pdkv_connectors.ipc.board import Board
from pdkv_connectors.ipc.columns import Ids
from pdkv_connectors.ipc.sums import STEP_NBYTES, PageSums

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv.transfer.geometry import CacheGeometry
    from pdkv_connectors.ipc.cuda_mover import CudaMover, CudaWork
    from pdkv_connectors.native import Kernels

SUM_TIMEOUT_S = 30.0
"""How long summing for a peer that waits may take."""


class Offers:
    """Of one registration.

    Args:
        mover: on CUDA; for sums, and for nothing else.
        keeps_sums: whether blocks are summed when they are offered.
        kernels: what sums them on the host; numpy without.

    Attributes:
        board: which blocks are complete, and summed where there are sums.
        sums: the table; None without.
    """

    def __init__(
        self,
        cache: GrowableKVCache,
        geometry: CacheGeometry,
        mover: CudaMover | None,
        *,
        keeps_sums: bool,
        kernels: Kernels | None = None,
    ) -> None:
        self._geometry = geometry
        self._mover = mover
        self._lock = threading.RLock()  # a thread that answers peers may note what the engine's thread has offered
        self._pending: list[tuple[list[CudaWork], Ids]] = []
        self.board = Board(geometry.num_blocks)
        try:
            self.sums = PageSums(cache, geometry, mover, kernels) if keeps_sums else None
        except BaseException:
            self.board.close()
            raise

    @property
    def num_pending(self) -> int:
        """Offers whose blocks are not on the board yet."""
        return len(self._pending)

    def offer(self, block_ids: Sequence[int] | Ids, *, group: int | None = None, after: int | None = None) -> None:
        """Blocks are complete: sum them and put them on the board, on CUDA by a later :meth:`progress`.

        Args:
            group: their KV-cache group; without one they are summed as blocks of each.
            after: on CUDA, an event that the device waits for first.

        Raises:
            ProtocolError: there is no such group or block.
        """
        blocks = np.asarray(block_ids, np.int32)
        with self._lock:
            self.withdraw(blocks)
            works = self._start(blocks, group, after)
            if works:
                self._pending.append((works, blocks))
            else:
                self.board.set(blocks, True)

    def withdraw(self, block_ids: Sequence[int] | Ids) -> None:
        """Blocks are about to be written."""
        blocks = np.asarray(block_ids, np.int32)
        with self._lock:
            self._pending = [(works, offered) for works, offered in self._pending if not np.isin(offered, blocks).any()]
            self.board.set(blocks, False)

    def progress(self) -> None:
        """Put on the board what was offered and has been summed by now. From any thread."""
        with self._lock:
            waiting = []
            for works, blocks in self._pending:
                if all(self._is_done(work) for work in works):
                    self.board.set(blocks, True)
                else:
                    waiting.append((works, blocks))
            self._pending = waiting

    def missing(self, blocks: Ids) -> Ids:
        """Those that are not on the board.

        Raises:
            ProtocolError: there is no such block.
        """
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self._geometry.num_blocks:
            raise ProtocolError(f"blocks were asked for that are not among the {self._geometry.num_blocks} committed.")
        return blocks[~self.board.are_set(blocks)]

    def sum_now(self, group: int, blocks: Ids) -> Iterator[None]:
        """Sum blocks as they are when all work of the device so far has ended; a step for each item. From any thread.

        Raises:
            ProtocolError: there is no such group or block.
            TransportError: the memory is being taken back.
        """
        if self._mover is not None:
            self._mover.synchronize_device()
        if self.sums is None:
            return
        # On CUDA one launch for all of them; what the table refuses is refused before the group's size is looked up.
        step = len(blocks) or 1
        if self._mover is None and 0 <= group < len(self._geometry.groups):
            step = max(1, STEP_NBYTES // self._geometry.block_nbytes(group))
        for first in range(0, len(blocks), step):
            work = self.sums.start(group, blocks[first : first + step])
            while not self.sums.is_done(work):
                yield
            yield

    def make_ready(self, group: int, block_ids: Sequence[int]) -> None:
        """For a peer that waits: :meth:`sum_now` to its end, for blocks that were not offered.

        Those that were keep their sums: what has happened to them since is to show.

        Raises:
            ProtocolError: there is no such group or block.
            TransportError: it takes longer than `SUM_TIMEOUT_S`.
        """
        if not 0 <= group < len(self._geometry.groups):
            raise ProtocolError(f"KV-cache group {group} was asked for, but there are {len(self._geometry.groups)}.")
        deadline = time.monotonic() + SUM_TIMEOUT_S
        for _ in self.sum_now(group, self.missing(np.asarray(block_ids, np.int32))):
            if time.monotonic() > deadline:
                raise TransportError(f"{len(block_ids)} blocks were not summed within {SUM_TIMEOUT_S:g} s.")

    def close(self) -> None:
        """Give the tables back. Idempotent; summing in another thread ends by a TransportError."""
        with self._lock:
            self._pending = []
        if self.sums is not None:
            self.sums.close()
        self.board.close()

    def _start(self, blocks: Ids, group: int | None, after: int | None) -> list[CudaWork]:
        """What has yet to end before the blocks are complete; nothing on the host."""
        if self.sums is not None:
            groups = range(len(self._geometry.groups)) if group is None else [group]
            started = [self.sums.start(number, blocks, after) for number in groups]
        elif after is not None and self._mover is not None:
            started = [self._mover.start_sums([], after)]  # nothing to sum: only the event to wait for
        else:
            started = []
        return [work for work in started if work is not None]

    def _is_done(self, work: CudaWork) -> bool:
        return self.sums.is_done(work) if self.sums is not None else work.is_done()


def require_agreed(wanted: bool, offered: bool) -> None:
    """Refuse a peer without sums, where this side is to verify.

    Raises:
        TransportError: it is one.
    """
    if wanted and not offered:
        raise TransportError("the peer keeps no sums, which this side is to verify; set `verify` alike on both.")
