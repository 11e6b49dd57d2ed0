"""The thread that keeps a session going while its engine takes no steps."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdkv.errors import ConnectorError
from pdkv.transfer.transport import LONGEST_PAUSE_S, SHORTEST_PAUSE_S

logger = logging.getLogger(__name__)

#: While peers rely on this side's progress, and nothing else is to be done.
PROGRESS_PAUSE_S = 5e-3
#: Even where nothing is due.
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn found.

    Attributes:
        worked: something was done, so that more may follow at once.
        polls: transfers run, which report nothing by themselves.
        serves: peers may rely on this side's progress.
        due_in_s: seconds until something is due; None where nothing is.
    """

    worked: bool
    polls: bool
    serves: bool
    due_in_s: float | None


class SessionThread:
    """Calls `turn` when a message has come, something is due, or :meth:`wake` is called; pauses grow while idle.

    Args:
        fileno: readable when a message has come.
    """

    def __init__(self, turn: Callable[[], Turn], fileno: int) -> None:
        self._turn, self._fileno = turn, fileno
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._wakes_at = math.inf  # not waiting: a turn that has begun may have looked too early
        self.turns = 0
        self._thread = threading.Thread(target=self._run, name="pdkv-session", daemon=True)
        self._thread.start()

    def wake(self, due_in_s: float | None = 0.0) -> None:
        """Make a turn at the latest in so many seconds."""
        if due_in_s is None or threading.current_thread() is self._thread:
            return
        if time.monotonic() + due_in_s < self._wakes_at:
            os.eventfd_write(self._event, 1)

    def require_running(self) -> None:
        """Raise ConnectorError, with what ended the thread, where something did."""
        if self._error is not None:
            raise ConnectorError(
                f"the session's thread has ended by an error in pdkv ({self._error!r}); end the engine, which cannot "
                "exchange KV any more."
            ) from self._error

    def close(self, timeout_s: float) -> None:
        """End the thread; idempotent.

        Raises:
            ConnectorError: it has not ended in time.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        os.eventfd_write(self._event, 1)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise ConnectorError(f"the session's thread has not ended within {timeout_s:g} s; a peer may not answer.")
        os.close(self._event)

    def _run(self) -> None:
        pause_s = SHORTEST_PAUSE_S
        try:
            while not self._stop.is_set():
                turn = self._turn()
                self.turns += 1
                pause_s = SHORTEST_PAUSE_S if turn.worked else 2 * pause_s
                self._wait(_wait_s(turn, pause_s))
        except Exception as error:
            self._error = error
            logger.exception("The session's thread has ended; no KV is exchanged any more.")

    def _wait(self, wait_s: float) -> None:
        self._wakes_at = time.monotonic() + wait_s
        select.select([self._fileno, self._event], [], [], wait_s)
        self._wakes_at = math.inf
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)


def _wait_s(turn: Turn, pause_s: float) -> float:
    longest_s = LONGEST_PAUSE_S if turn.polls else PROGRESS_PAUSE_S if turn.serves else LONGEST_WAIT_S
    wait_s = min(pause_s, longest_s) if turn.polls or turn.serves else longest_s
    return wait_s if turn.due_in_s is None else max(0.0, min(wait_s, turn.due_in_s))
