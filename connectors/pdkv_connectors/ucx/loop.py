"""The thread in which everything of UCX happens: one for the process, since UCX has one context for the process."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar, TypeVar

from pdkv.errors import PdkvError, TransferTimeoutError, TransportError
from pdkv_connectors.ucx.api import find_ucx, start_ucx

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_S = 30.0
STOP_S = 5.0


class UcxLoop:
    """An asyncio event loop in a thread of its own, with UCX initialised in it."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[UcxLoop | None] = None

    def __init__(self, options: Mapping[str, str]) -> None:
        self.ucx = find_ucx()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdkv-ucx", daemon=True)
        self._thread.start()
        self.run(self._start(options), START_S)

    @classmethod
    def shared(cls, options: Mapping[str, str]) -> UcxLoop:
        """The process's own; started with `options` if need be, and stopped when the interpreter exits.

        Raises:
            TransportError: UCX is not installed, or did not start.
        """
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls(options)
                atexit.register(cls._shared.stop)
            return cls._shared

    def spawn(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin something in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Do something in the thread and wait for it.

        Raises:
            TransferTimeoutError: it took longer; it is cancelled.
            TransportError: UCX reported an error.
        """
        future = self.spawn(work)
        try:
            return future.result(timeout_s)
        except PdkvError:
            raise
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TransferTimeoutError(f"UCX did not answer within {timeout_s:g} s; the peer may have gone.") from None
        except Exception as error:
            raise TransportError(f"UCX reported {type(error).__name__}: {error}.") from error

    def stop(self) -> None:
        """End the thread, and UCX's own before it: they must not run while the interpreter goes. Idempotent."""
        if not self._thread.is_alive():
            return
        try:
            self.run(self._stop(), STOP_S)
        except PdkvError as error:
            logger.warning("UCX was not stopped in order: %s", error)
        if hasattr(self.ucx, "stop_notifier_thread"):
            self.ucx.stop_notifier_thread()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    async def _start(self, options: Mapping[str, str]) -> None:
        start_ucx(self.ucx, options)

    async def _stop(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
