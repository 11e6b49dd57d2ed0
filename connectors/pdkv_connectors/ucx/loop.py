"""The thread in which everything of UCX happens: one for the process, since UCX has one context for the process."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar, TypeVar

from pdkv.errors import PdkvError, TransferTimeoutError, TransportError
from pdkv.transfer.connecting import Steps
from pdkv_connectors.descriptors import require_to_start
from pdkv_connectors.ucx.api import find_ucx, start_ucx

logger = logging.getLogger(__name__)

T = TypeVar("T")
End = Callable[[], Coroutine[Any, Any, None]]

START_S = 30.0
STOP_S = 5.0


class UcxLoop:
    """An asyncio event loop in a thread of its own, with UCX initialised in it.

    Once it has been stopped nothing waits for it any more: every call is refused at once.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[UcxLoop | None] = None

    def __init__(self, options: Mapping[str, str]) -> None:
        self.ucx = find_ucx()
        require_to_start("UCX")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pdkv-ucx", daemon=True)
        self._state = threading.Lock()  # held while work is handed to the thread, so that none is after the last
        self._over = False
        self._work: set[concurrent.futures.Future[Any]] = set()
        self._users: dict[object, End] = {}
        self._thread.start()
        try:
            self.run(self._start(options), START_S)
        except BaseException:
            self.stop()
            raise

    @classmethod
    def shared(cls, options: Mapping[str, str]) -> UcxLoop:
        """The process's own; started with `options` if need be, and stopped when the interpreter exits.

        Raises:
            TransportError: UCX is not installed, did not start or has too few file descriptors left to, or has been
                stopped.
        """
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls(options)
                atexit.register(cls._shared.stop)
            cls._shared.require_running()
            return cls._shared

    @property
    def is_over(self) -> bool:
        """Whether it was stopped; whoever used it has been ended."""
        return self._over

    def require_running(self) -> None:
        """Raise TransportError where it was stopped."""
        if self._over:
            raise TransportError("UCX was stopped, since the interpreter exits; nothing moves by it any more.")

    def use(self, user: object, end: End) -> None:
        """Have `end` run, in the thread, before that stops; until :meth:`leave`."""
        self._users[user] = end

    def leave(self, user: object) -> None:
        """Idempotent."""
        self._users.pop(user, None)

    def spawn(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin something in the thread.

        Raises:
            TransportError: it was stopped; nothing has begun.
        """
        with self._state:
            if self._over:
                work.close()
            self.require_running()
            return self._spawn(work)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Do something in the thread and wait for it.

        Raises:
            TransferTimeoutError: it took longer; it is cancelled.
            TransportError: UCX reported an error, or was stopped.
        """
        return self._result(self.spawn(work), timeout_s)

    def steps(self, work: Coroutine[Any, Any, T], timeout_s: float, drop: Callable[[T], object]) -> Steps[T]:
        """As :meth:`run`, in steps that do not wait.

        Args:
            drop: gets what came of it where the steps are not taken to their end; else `work` is cancelled then.
        """
        future = self.spawn(work)
        deadline = time.monotonic() + timeout_s
        try:
            while not future.done() and time.monotonic() < deadline:
                yield
        except GeneratorExit:
            if not future.cancel() and future.exception() is None:
                drop(future.result())
            raise
        return self._result(future, timeout_s, wait_s=0.0)

    def stop(self) -> None:
        """End who uses it, then the thread, and UCX's own before it: they must not run while the interpreter goes.

        Idempotent.
        """
        with self._state:
            if self._over:
                return
            self._over = True
            last = self._spawn(self._stop())
        try:
            self._result(last, STOP_S)
        except PdkvError as error:
            logger.warning("UCX was not stopped in order: %s", error)
        if hasattr(self.ucx, "stop_notifier_thread"):
            self.ucx.stop_notifier_thread()
        for future in list(self._work):
            future.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._work.add(future)
        future.add_done_callback(self._work.discard)
        return future

    def _result(self, future: concurrent.futures.Future[T], timeout_s: float, *, wait_s: float | None = None) -> T:
        try:
            return future.result(timeout_s if wait_s is None else wait_s)
        except PdkvError:
            raise
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TransferTimeoutError(f"UCX did not answer within {timeout_s:g} s; the peer may have gone.") from None
        except concurrent.futures.CancelledError:
            raise TransportError("UCX was stopped meanwhile, since the interpreter exits.") from None
        except Exception as error:
            raise TransportError(f"UCX reported {type(error).__name__}: {error}.") from error

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _start(self, options: Mapping[str, str]) -> None:
        start_ucx(self.ucx, options)

    async def _stop(self) -> None:
        ends = [asyncio.ensure_future(end()) for end in list(self._users.values())]
        if ends:
            await asyncio.wait(ends, timeout=STOP_S / 2)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
