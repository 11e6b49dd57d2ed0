"""Peers that run stock vLLM: what they say, told to pdkv's endpoints, and a watchdog for their KV.

P keeps all leases in `pdkv.transfer`, whoever the decode engine is. A stock one sends heartbeats and completions as
NIXL notifications, or a registration that the stock writer answers; each is put to the `Producer` as the message that
it means. On D the KV of a stock P takes the stock way, whose failures stock vLLM may never notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pdkv.transfer.messages import Done, EngineRef, Renew, TransferKey

if TYPE_CHECKING:
    from pdkv.transfer import Producer, Reference
    from pdkv.transfer.clock import Clock

#: Stands for all stock decode engines; what is sent to it is not sent.
STOCK = EngineRef("stock vLLM decode", 0)


class StockDecoders:
    """Speaks to the producer for decode engines that run stock vLLM.

    Args:
        reference_of: the reference to a request's blocks, by request id; None where they are not held.
    """

    def __init__(self, producer: Producer, reference_of: Callable[[str], Reference | None]) -> None:
        self._producer = producer
        self._reference_of = reference_of
        self._consumers: Counter[str] = Counter()

    def heartbeat(self, request_ids: Iterable[str]) -> None:
        """A stock D still wants the blocks of these requests."""
        for request_id in request_ids:
            if (reference := self._reference_of(request_id)) is not None:
                self._say(Renew, reference, sequence=0)

    def done(self, request_id: str, consumers: int = 1) -> None:
        """One of `consumers` ranks of a stock D has read the blocks, or has been written to."""
        reference = self._reference_of(request_id)
        if reference is None:
            self._producer.counters.count("late_ends")
            return
        self._consumers[request_id] += 1
        if self._consumers[request_id] >= consumers:
            del self._consumers[request_id]
            self._say(Done, reference)

    def forget(self, request_id: str) -> None:
        """Its blocks are held no more."""
        self._consumers.pop(request_id, None)

    def _say(self, kind: type[Renew] | type[Done], reference: Reference, **fields: Any) -> None:
        key = TransferKey(reference.request_id, 0, 0)
        self._producer.received(
            kind(sender=STOCK, receiver=self._producer.me, key=key, claim=reference.claim(0), **fields)
        )


class StockLoads:
    """Watches the requests whose KV comes from a stock P.

    Args:
        worker: the stock worker.
        timeout_s, rebuild_after_s: when a load has failed, and when the agent must be rebuilt to end it.
    """

    def __init__(self, clock: Clock, worker: Any, timeout_s: float, rebuild_after_s: float) -> None:
        self._clock = clock
        self._worker = worker
        self._timeout_s, self._rebuild_after_s = timeout_s, rebuild_after_s
        self._since: dict[str, float] = {}
        self._failed: set[str] = set()

    def newly_failed(self) -> set[str]:
        """Requests that have waited for too long since the last call. Their blocks stay held until their load ends."""
        now, loading = self._clock.monotonic(), self._worker._recving_metadata
        self._since = {request_id: self._since.get(request_id, now) for request_id in list(loading)}
        overdue = {request_id for request_id, since in self._since.items() if now - since >= self._timeout_s}
        new = overdue - self._failed
        self._failed = overdue
        return new

    def attach(self, worker: Any) -> set[str]:
        """Another stock worker: the requests whose load has ended with the old one's agent."""
        lost = set(self._worker._recving_metadata)
        self._worker, self._since, self._failed = worker, {}, set()
        return lost

    def why_rebuild(self) -> str | None:
        """Why only a new agent can give blocks back, or None."""
        now = self._clock.monotonic()
        oldest_s = max((now - self._since[request_id] for request_id in self._failed), default=0.0)
        if oldest_s < self._timeout_s + self._rebuild_after_s:
            return None
        return f"a load from a stock prefill engine has not ended in {oldest_s:.0f} s"

    def num_blocks(self) -> int:
        """Blocks of failed loads that may still be written: a metric."""
        found = [meta for key, meta in list(self._worker._recving_metadata.items()) if key in self._failed]
        return sum(len(group) for meta in found for group in meta.local_block_ids)
