"""The ends of requests while the NIXL agent goes and another comes: rebuilt to end a transfer, or asleep."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pdkv_connectors.vllm.block_transfers import BlockTransfers

if TYPE_CHECKING:
    from pdkv.transfer import Descriptor
    from pdkv.transfer.endpoint import Endpoint
    from pdkv_connectors.vllm.ends_decode import DecodeEnds
    from pdkv_connectors.vllm.ends_prefill import PrefillEnds


class AgentComesAndGoes:
    """What :class:`pdkv_connectors.vllm.ends.WorkerEnds` does around the end of a stock worker."""

    _lock: threading.RLock
    _worker: Any
    _transfers: BlockTransfers
    _prefill: PrefillEnds | None
    _decode: DecodeEnds | None
    _handshakes: dict[tuple[int, int], Any]
    _rebuild_wanted: str | None

    @property
    def _endpoints(self) -> list[Endpoint]:
        raise NotImplementedError

    def _act(self) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def without_agent(self) -> Iterator[None]:
        """Inside, the stock worker and its agent are destroyed and others built: nothing touches them, peers wait.

        Ends with :meth:`attach`.
        """
        with self._lock:
            self._worker = None
            self._transfers.forget()
            yield

    def holders(self) -> tuple[str, ...]:
        """Requests whose blocks a peer may still read or write."""
        with self._lock:
            return tuple(name for endpoint in self._endpoints for name in endpoint.holders())

    def sleep(self) -> None:
        """Refuse peers until :meth:`attach`, which wakes. Does nothing where they are refused already.

        Raises:
            StateError: blocks are held; the message says by whom.
        """
        with self._lock:
            if self._prefill is not None and not self._prefill.endpoint.asleep:
                self._prefill.endpoint.sleep()

    def attach(self, worker: Any, descriptor: Descriptor, generation: int) -> None:
        """A new stock worker is registered, as `generation`: no transfer of the old agent goes on."""
        with self._lock:
            self._worker, worker.ends = worker, self
            self._transfers = BlockTransfers(worker)
            self._rebuild_wanted = None
            for side in (self._prefill, self._decode):
                if side is not None:
                    side.attach(worker)
                    if side is self._prefill and side.endpoint.asleep:
                        side.endpoint.wake(generation, descriptor)
                    else:
                        side.endpoint.agent_rebuilt(generation, descriptor)
            self._act()

    def published(self, rank: tuple[int, int], payload: Any) -> None:
        """The handshake that the scheduler must serve from now on."""
        with self._lock:
            self._handshakes[rank] = payload

    def why_rebuild(self) -> str | None:
        """Why the agent must be destroyed and built anew now; None where it need not be."""
        with self._lock:
            stock = None if self._decode is None else self._decode.stock.why_rebuild()
            return self._rebuild_wanted or stock
