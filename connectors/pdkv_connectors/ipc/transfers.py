"""One transfer of the ipc transport: waits for P where it must, then copies, then tells what the sums said."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdkv.errors import PdkvError, TransferTimeoutError
from pdkv.transfer.base import PostedTransfer
from pdkv.transfer.checks import Connection
from pdkv.transfer.clock import Clock, SystemClock
from pdkv.transfer.transport import TransferState
from pdkv_connectors.ipc.board import Marks
from pdkv_connectors.ipc.columns import BlockColumns
from pdkv_connectors.ipc.offers import SUM_TIMEOUT_S
from pdkv_connectors.ipc.route import Route, Running
from pdkv_connectors.ipc.wire import MAX_OFFERED_BLOCKS

if TYPE_CHECKING:
    from pdkv_connectors.ipc.transport import IpcTransport

SPIN_S = 2e-3
"""So long :meth:`IpcTransfer.wait` looks without a pause: a sleep takes 60 µs at least, as a copy of 128 MiB does."""

ANSWER_TIMEOUT_S = SUM_TIMEOUT_S + 10.0
"""How long P has for each answer: it sums first, and may have to sum for another peer before."""

_CLOCK = SystemClock()


class IpcTransfer(PostedTransfer):
    """See the module's docstring."""

    def __init__(
        self,
        transport: IpcTransport,
        connection: Connection[Route],
        columns: Sequence[BlockColumns],
        programs: int | None,
    ) -> None:
        self._clock: Clock = _CLOCK
        self._answer_by = 0.0
        self._route = connection.link
        super().__init__(transport, connection, self._route.nbytes(columns))
        self._columns = columns
        self._programs = programs
        self._unasked: list[tuple[int, tuple[int, ...]]] = []  # blocks of a group that P is to be asked for
        self._tickets: list[int] = []
        self._marks: Sequence[Marks] = ()  # what P said of the blocks as the copy was started
        self._running: Running | None = None
        self._canceled = False

    def begin(self) -> None:
        """Copy, or ask P for blocks that it has not announced.

        Raises:
            StaleGenerationError: the peer has gone.
        """
        link = self._route.link
        with link.lock:
            link.require_open()
            self._marks = self._route.marks(self._columns)
            missing = self._route.missing(self._columns, self._marks)
            if not missing:
                self._running = self._route.start(self._columns, self._programs)
                return
        self._transport.counts["offers_asked"] += 1
        self._answer_by = self._clock.monotonic() + ANSWER_TIMEOUT_S
        self._unasked = [
            (group, tuple(blocks[first : first + MAX_OFFERED_BLOCKS]))
            for group, blocks in missing
            for first in range(0, len(blocks), MAX_OFFERED_BLOCKS)
        ]
        self._ask()

    @property
    def moves_in_poll(self) -> bool:
        return self._running is not None and self._route.needs_memory

    def wait(self, timeout_s: float) -> TransferState:
        if not self._route.needs_memory:
            end = time.perf_counter() + min(SPIN_S, timeout_s)
            while self.poll() is TransferState.RUNNING and time.perf_counter() < end:
                continue
        return super().wait(timeout_s)

    def cancel(self) -> None:
        """Start nothing any more."""
        self._canceled = True

    def end(self, state: TransferState, reason: str = "") -> None:
        if self._tickets:
            self._route.link.forget(self._tickets)
        super().end(state, reason)

    def abandon(self) -> bool:
        # On the host nothing moves but in poll(), and nothing at all while P is asked.
        at_rest = self._running is None or self._route.needs_memory
        return self.end_abandoned() if at_rest else super().abandon()

    def _look(self) -> TransferState:
        try:
            return self._advance()
        except PdkvError as error:
            self.reason = str(error)
            return TransferState.FAILED

    def _advance(self) -> TransferState:
        if self._canceled and (self._running is None or self._route.needs_memory):
            self.reason = "it was canceled"
            return TransferState.FAILED
        if self._running is None and not self._start_when_answered():
            return TransferState.FAILED if self.reason else TransferState.RUNNING
        running = self._running
        if running is None:
            return TransferState.RUNNING
        if not self._route.needs_memory:
            done = running.advance()
        else:
            with self._route.link.lock:
                self._route.link.require_open()
                done = running.advance()
        if not done:
            return TransferState.RUNNING
        if (block := running.wrong_block) is not None:
            self._differs(block)
            return TransferState.FAILED
        return TransferState.DONE

    def _differs(self, block: int) -> None:
        """Its sum was wrong. One that P has taken back since the READ began may have been written, which is no damage:
        a READ may have been posted before P had said that it holds the blocks, when it did not.
        """
        link = self._route.link
        with link.lock:
            is_damage = link.is_open and not self._route.was_taken_back(block, self._columns, self._marks)
        if is_damage:
            self._transport.counts["checksum_failures"] += 1
            self.reason = f"the bytes of block {block} are not those that its owner summed"
        else:
            self._transport.counts["rewritten"] += 1
            self.reason = f"block {block} was written again by its owner while it was being transferred"

    def _ask(self) -> None:
        """Ask P for as much as it takes now."""
        while self._unasked:
            ticket = self._route.link.ask_for(*self._unasked[-1])
            if ticket is None:
                return
            self._tickets.append(ticket)
            self._unasked.pop()

    def _start_when_answered(self) -> bool:
        """Start once P has answered every ticket; where it said no, :attr:`reason` is set."""
        link = self._route.link
        self._ask()
        while self._tickets:
            said = link.answer(self._tickets[-1])
            if said is None:
                break
            if said:
                self.reason = f"the peer cannot offer these blocks: {said}"
                return False
            self._tickets.pop()
            self._answer_by = self._clock.monotonic() + ANSWER_TIMEOUT_S
        if self._tickets or self._unasked:
            if self._clock.monotonic() > self._answer_by:
                raise TransferTimeoutError(
                    f"the peer has not answered for {ANSWER_TIMEOUT_S:g} s that its blocks are complete; see "
                    "whether its engine runs."
                )
            return False
        with link.lock:
            link.require_open()
            self._marks = self._route.marks(self._columns)
            self._running = self._route.start(self._columns, self._programs)
        return True
