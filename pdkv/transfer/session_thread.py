"""The thread that keeps a session going while its engine takes no steps."""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdkv.errors import ConnectorError
from pdkv.transfer.signals import Signal
from pdkv.transfer.transport import LONGEST_PAUSE_S, POLL_GROWTH, SHORTEST_PAUSE_S

logger = logging.getLogger(__name__)

#: While peers rely on this side's progress, and nothing else is to be done.
PROGRESS_PAUSE_S = 5e-3
#: Even where nothing is due. No longer than what a call makes due (:class:`pdkv.transfer.leases.LeaseSettings`), so
#: that the thread need not be woken, and compete with what the call has set off, only to hear of it.
LONGEST_WAIT_S = 1.0
#: So many times longer each pause is while no transfer runs here.
IDLE_GROWTH = 2.0
#: select() takes only descriptors below this, and is preferred, since poll() waits for whole milliseconds.
FD_SETSIZE = 1024


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
        self._signal = Signal()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._wakes_at = math.inf  # not waiting: a turn that has begun may have looked too early
        self._is_news = False
        self.turns = 0
        self._thread = threading.Thread(target=self._run, name="pdkv-session", daemon=True)
        self._thread.start()

    def wake(self, turn: Turn) -> None:
        """Go on from what another thread has found; nothing where the thread has been closed."""
        if threading.current_thread() is self._thread:
            return
        # Noted also where it looks soon enough by itself: it would pause as before afterwards.
        self._is_news = True
        if time.monotonic() + _wait_s(turn, SHORTEST_PAUSE_S) < self._wakes_at:
            self._signal.set()

    def instead(self, turn: Callable[[], Turn | None]) -> bool:
        """Make this turn in the calling thread, in the place of one that the own thread would be woken for.

        Whether that was done: `turn` returns None where it cannot be done now. An error ends the own thread too.
        """
        if self._stop.is_set():
            return False
        try:
            made = turn()
        except Exception as error:
            self._fail(error)
            return False
        if made is not None:
            self.wake(made)
        return made is not None

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
            ConnectorError: it has not ended in time, and keeps what it uses; close() again.
        """
        self._stop.set()
        self._signal.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise ConnectorError(f"the session's thread has not ended within {timeout_s:g} s; a peer may not answer.")
        self._signal.close()

    def _run(self) -> None:
        pause_s = SHORTEST_PAUSE_S
        try:
            while not self._stop.is_set():
                is_news, self._is_news = self._is_news, False
                turn = self._turn()
                self.turns += 1
                growth = POLL_GROWTH if turn.polls else IDLE_GROWTH
                pause_s = SHORTEST_PAUSE_S if turn.worked or is_news else min(growth * pause_s, LONGEST_WAIT_S)
                self._wait(_wait_s(turn, pause_s))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._stop.set()
        self._signal.set()
        logger.exception("The session's thread has ended; no KV is exchanged any more.")

    def _wait(self, wait_s: float) -> None:
        self._wakes_at = time.monotonic() + wait_s
        _wait_for((self._fileno, self._signal.fileno()), wait_s)
        self._wakes_at = math.inf
        self._signal.clear()


def _wait_for(descriptors: Sequence[int], wait_s: float) -> None:
    """Until one of them is readable, or the time is over."""
    if max(descriptors) < FD_SETSIZE:
        select.select(descriptors, [], [], wait_s)
        return
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(1000 * wait_s)


def _wait_s(turn: Turn, pause_s: float) -> float:
    longest_s = LONGEST_PAUSE_S if turn.polls else PROGRESS_PAUSE_S if turn.serves else LONGEST_WAIT_S
    wait_s = min(pause_s, longest_s) if turn.polls or turn.serves else longest_s
    return wait_s if turn.due_in_s is None else max(0.0, min(wait_s, turn.due_in_s))
