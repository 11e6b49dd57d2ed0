"""The connector's half of sleeping and waking: what `pdkv.lifecycle` asks of it (`SleepsWithPeers`).

Going to sleep ends the stock NIXL worker and its agent; waking builds new ones. A new agent has a new name and new
metadata, so that a peer with the old ones cannot reach this engine at all. Building one takes 0.5 s on a host and up to
2.7 s on a card, so it is begun in the background as soon as the engine sleeps: an agent without registrations can serve
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from pdkv.errors import ConnectorError, StateError
from pdkv_connectors.vllm.agent import destroy_worker
from pdkv_connectors.vllm.guard import GuardedAgent

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv_connectors.vllm.ends import WorkerEnds

logger = init_logger(f"vllm.{__name__}")

#: Longest time that waking waits for an agent which is being built in the background, in seconds.
BUILD_TIMEOUT_S = 60.0


class Standby:
    """A stock worker that is built in a thread of its own, for the next registration."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._worker: Any = None
        self._error: BaseException | None = None
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._run, name="pdkv-standby", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # per thread; UCX looks for the current context
            self._worker = self._make()
        except Exception as error:
            self._error = error

    def take(self) -> Any:
        """The worker; None, with a line in the log, where it could not be built, so that it must be built again.

        Raises:
            ConnectorError: it has not been built in time.
        """
        self._thread.join(BUILD_TIMEOUT_S)
        if self._thread.is_alive():
            raise ConnectorError(
                f"the KV connector's agent has not been built within {BUILD_TIMEOUT_S:g} s; wake the engine again."
            )
        if self._error is not None:
            logger.warning("pdkv: an agent could not be built while asleep, building it now: %r", self._error)
        return self._worker


class SleepingConnector:
    """Mixed in before `facade_ends.EndsConnector`; its worker side is made by `make_stock_worker`."""

    connector_worker: Any
    _views: dict[str, torch.Tensor]
    _worker: Any
    _ends: WorkerEnds | None
    _ends_generation: int

    _standby: Standby | None = None

    @property
    def generation(self) -> int:
        """Of the registration that peers know: rises with each one. 0 before the first."""
        return self._ends_generation

    def make_stock_worker(self) -> Any:
        """A stock worker for the final config, not registered."""
        raise NotImplementedError

    def _register(self) -> None:
        """Register the views by the worker that there is, and meet peers."""
        raise NotImplementedError

    def refuse_transfers(self) -> None:
        """Nothing: the engine runs no step, without which no request and no transfer begins."""

    def resume_transfers(self) -> None:
        """Nothing, as above."""

    def holders(self) -> tuple[str, ...]:
        """Requests that this rank still has to send or to receive, by either protocol."""
        worker = self.connector_worker
        if worker is None:
            return ()
        books = (worker._reqs_to_send, worker._recving_metadata, getattr(worker, "_sending_transfers", {}))
        held = {req_id for book in books for req_id in list(book)}
        return tuple(sorted(held | set(() if self._ends is None else self._ends.holders())))

    def abort_transfers(self, reason: str) -> None:
        """Nothing here: the scheduler ends requests, and tells the workers in a step."""

    def withdraw(self) -> None:
        """Nothing here: the handshake is withdrawn by the scheduler's process (`sleep_engine.py`).

        Peers that ask over the side channel are told from :meth:`unregister_kv_cache` on that the engine is asleep.
        """

    def publish(self, generation: int) -> None:
        """Nothing here, as above: the scheduler's process publishes what `get_handshake_metadata` says."""

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        """Register the committed views, by a new agent where the last one was destroyed; the connector is live then.

        Raises:
            ExtentError: a range to be registered is not committed, or crosses a chunk. NIXL has not seen it.
            StateError: called before the cache had its final size.
        """
        if self._worker is None:
            if not self.generation:
                raise StateError("the KV connector is not built yet; call build() before register_kv_cache().")
            standby, self._standby = self._standby, None
            self._worker = (standby.take() if standby is not None else None) or self.make_stock_worker()
        self._worker.nixl_wrapper = GuardedAgent(self._worker.nixl_wrapper, cache)
        self._register()

    def unregister_kv_cache(self) -> None:
        """Refuse peers, destroy the stock worker and its agent, and begin to build the next one. Idempotent.

        Raises:
            StateError: requests hold blocks.
            TransportError: the agent could not be destroyed; it counts as registered still.
        """
        if self._worker is None:
            return
        if self._ends is None:
            self._destroy_worker()
        else:
            self._ends.sleep()
            with self._ends.without_agent():
                self._destroy_worker()
        if self.generation:
            self._standby = Standby(self.make_stock_worker)

    def _destroy_worker(self) -> None:
        destroy_worker(self._worker)
        self._worker = self.connector_worker = None

    # vLLM 0.33 calls these around its sleep backend, in which `pdkv.lifecycle` does the same in its own order.

    def unregister_kv_caches(self) -> None:
        """Done by the sleep backend, before it releases anything."""

    def restore_kv_caches(self) -> None:
        """Done by the sleep backend, after it has memory again."""
