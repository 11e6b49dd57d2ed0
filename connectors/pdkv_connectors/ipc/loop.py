"""The one thread of an ipc transport: it answers peers whatever the engine's own threads are doing."""

from __future__ import annotations

import logging
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from pdkv.errors import TransferTimeoutError

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0


class Loop:
    """Calls back when sockets have something to read. All its methods may be called from any thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._alarm = socket.socketpair()
        self._wakeup.setblocking(False)
        self._alarm.setblocking(False)
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._over = False
        self._resting: list[tuple[float, socket.socket, Callable[[], None]]] = []
        # Held while the thread closes its sockets: nobody else closes one then, nor sends an alarm on one.
        self._over_lock = threading.Lock()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._run_tasks)
        self._thread = threading.Thread(target=self._run, name="pdkv-ipc", daemon=True)
        self._thread.start()

    def add(self, connection: socket.socket, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` in the loop's thread when there is something to read; a loop that is over closes it."""
        if not self._soon(lambda: self._register(connection, on_readable)):
            connection.close()

    def close(self, connection: socket.socket) -> None:
        """Forget a socket and close it, from the loop's thread while there is one."""
        if not self._soon(lambda: self._unregister(connection)):
            connection.close()

    def rest(self, connection: socket.socket, for_s: float) -> None:
        """Hear nothing of a socket for so long. For its own `on_readable` to call, where it can do nothing now."""
        if connection.fileno() >= 0:
            key = self._selector.unregister(connection)
            self._resting.append((time.monotonic() + for_s, connection, key.data))

    def stop(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """End the thread, and close the sockets that it has. Idempotent.

        Raises:
            TransferTimeoutError: it has not ended in time; whatever it uses must stay. Call again.
        """
        self._stopping = True
        self._soon(lambda: None)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransferTimeoutError(
                f"the ipc thread has not ended within {timeout_s:g} s, it is {self._place()}; what it uses is kept, so "
                "close() again."
            )

    def _place(self) -> str:
        """Where the thread is."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "about to end"
        innermost = reversed(traceback.extract_stack(frame)[-3:])
        return "in " + ", called by ".join(f"{at.name} ({at.filename}:{at.lineno})" for at in innermost)

    def _soon(self, task: Callable[[], None]) -> bool:
        """Whether the thread will run it: it does not where it has ended."""
        with self._over_lock:
            if self._over:
                return False
            self._tasks.put(task)
            with suppress(BlockingIOError):  # so many alarms are unread that this one is not needed
                self._alarm.send(b"!")
            return True

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, _ in self._selector.select(self._wake_rested()):
                    if not self._survives(key.data):
                        self._unregister(key.fileobj)  # type: ignore[arg-type]
        finally:
            self._end()

    def _end(self) -> None:
        with self._over_lock:
            self._over = True
            self._run_tasks()
            for key in list(self._selector.get_map().values()):
                self._unregister(key.fileobj)  # type: ignore[arg-type]
            for _, connection, _ in self._resting:
                connection.close()
            self._selector.close()
            self._alarm.close()

    def _wake_rested(self) -> float | None:
        """Hear again of sockets that have rested; seconds until the next one has."""
        now, resting = time.monotonic(), self._resting
        self._resting = [rest for rest in resting if rest[0] > now]
        for until, connection, on_readable in resting:
            if until <= now:
                self._register(connection, on_readable)
        return min((until - now for until, _, _ in self._resting), default=None)

    def _run_tasks(self) -> None:
        with suppress(BlockingIOError):
            self._wakeup.recv(4096)
        while True:
            try:
                task = self._tasks.get_nowait()
            except Empty:
                return
            self._survives(task)

    def _survives(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception:
            logger.exception("The ipc thread failed at a peer's message; it goes on with others.")
            return False
        return True

    def _register(self, connection: socket.socket, on_readable: Callable[[], None]) -> None:
        if connection.fileno() < 0:
            return
        try:
            self._selector.register(connection, selectors.EVENT_READ, on_readable)
        except BaseException:
            self._unregister(connection)  # nobody would hear of it, nor close it
            raise

    def _unregister(self, connection: socket.socket) -> None:
        if connection.fileno() >= 0:
            if connection.fileno() in self._selector.get_map():
                self._selector.unregister(connection)
            connection.close()  # also of one that rests, which is not woken then
