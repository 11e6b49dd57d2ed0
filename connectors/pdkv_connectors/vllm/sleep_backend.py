"""The sleep backend ``pdkv`` for ``--sleep-mode-backend``: vLLM's own for weights, `pdkv.lifecycle` for the KV cache.

The cache is unregistered and released before anything else is suspended, and committed and registered after everything
else is back. vLLM makes the backend at the first sleep and gives it no worker, so the worker leaves itself here.
"""

from __future__ import annotations

import weakref
from typing import Any

from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from pdkv.errors import SeamError
from pdkv_connectors.vllm.patches import SLEEP_BACKEND

_worker: weakref.ref[Any] | None = None


def bind(worker: Any) -> None:
    """Make `worker` the one of this process, which is put to sleep."""
    global _worker
    _worker = weakref.ref(worker)


class PdkvSleepBackend(CuMemBackend):  # type: ignore[misc]
    """Suspends and resumes the growable cache together with what vLLM's allocator holds."""

    @property
    def worker(self) -> Any:
        """The growable worker of this process.

        Raises:
            SeamError: there is none: the engine was started without one of pdkv's worker classes.
        """
        worker = None if _worker is None else _worker()
        if worker is None:
            raise SeamError(
                f"the sleep backend {SLEEP_BACKEND!r} is for engines with a growable worker; add --worker-cls "
                "pdkv_connectors.vllm.worker.GrowableGPUWorker, or take --sleep-mode-backend cumem."
            )
        return worker

    def suspend(self, level: int = 1) -> None:
        self.worker.put_cache_to_sleep()
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume(tags)
        if tags is None or "kv_cache" in tags:
            self.worker.wake_cache()

    def discard(self, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            self.worker.put_cache_to_sleep()
        rest = tuple(tag for tag in tags if tag != "kv_cache")
        if rest:
            super().discard(rest)
