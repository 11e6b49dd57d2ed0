"""A file descriptor by which one thread wakes another, safe to use while a third closes it."""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress


class Signal:
    """A file descriptor that is readable while it is set. Threads may share it, also while one of them closes it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # the number of a closed descriptor may soon be another file's
        self._waiting = 0
        self._closed = False

    def fileno(self) -> int:
        """-1 once it is closed."""
        return -1 if self._closed else self._fd

    def set(self) -> bool:
        """False where it is closed."""
        with self._lock:
            if self._closed:
                return False
            os.eventfd_write(self._fd, 1)
            return True

    def clear(self) -> None:
        with self._lock:
            if not self._closed:
                with suppress(BlockingIOError):  # was not set
                    os.eventfd_read(self._fd)

    def wait(self, timeout_s: float) -> bool:
        """Whether it is set or closed, at the latest after so many seconds."""
        with self._lock:
            if self._closed:
                return True
            self._waiting += 1
        try:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            return bool(poll.poll(max(0.0, timeout_s) * 1000))
        finally:
            with self._lock:
                self._waiting -= 1
                self._close_unless_waited_for()

    def close(self) -> None:
        """Let those who wait go on; the last of them closes the descriptor. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._fd, 1)
            self._close_unless_waited_for()

    def _close_unless_waited_for(self) -> None:
        if self._closed and not self._waiting:
            os.close(self._fd)
