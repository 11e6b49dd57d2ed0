"""The one thread of an ipc transport: it answers peers whatever the engine's own threads are doing."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0


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

    def stop(self) -> None:
        """End the thread. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._soon(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)

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
        while not self._stopping:
            for key, _ in self._selector.select():
                if not self._survives(key.data):
                    self._unregister(key.fileobj)  # type: ignore[arg-type]
        with self._over_lock:
            self._over = True
            self._run_tasks()
            for key in list(self._selector.get_map().values()):
                self._unregister(key.fileobj)  # type: ignore[arg-type]
            self._selector.close()
            self._alarm.close()

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
        if connection.fileno() >= 0:
            self._selector.register(connection, selectors.EVENT_READ, on_readable)

    def _unregister(self, connection: socket.socket) -> None:
        if connection.fileno() >= 0:
            if connection.fileno() in self._selector.get_map():
                self._selector.unregister(connection)
            connection.close()
