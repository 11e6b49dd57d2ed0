"""P's half of a rank's ends: prompts that are kept for decode, until `pdkv.transfer` lets go of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.logger import init_logger

from pdkv.errors import StateError
from pdkv.transfer import Descriptor, EngineRef, Producer, ProducerSettings, Reference, SystemClock
from pdkv.transfer.messages import Keyed
from pdkv_connectors.vllm.ends_events import Events, Prefilled
from pdkv_connectors.vllm.stock_peers import StockDecoders

logger = init_logger(f"vllm.{__name__}")

_MAX_PARKED = 4096


class PrefillEnds:
    """Requests between the scheduler's `request_finished` and its `finished_sending`.

    Args:
        worker: the stock worker (`nixl_workers`); replaced when the agent is rebuilt.
    """

    def __init__(
        self, worker: Any, me: EngineRef, descriptor: Descriptor, settings: ProducerSettings, rank: int
    ) -> None:
        self.endpoint = Producer(SystemClock(), me, descriptor, settings)
        self.worker = worker
        self._rank = rank
        self._held: dict[str, Reference] = {}  # by request id; a reference has the name between P and D
        self._request_ids: dict[str, str] = {}  # by that name
        self._expected: set[str] = set()  # names of requests whose prefill runs
        self._parked: list[Any] = []  # messages about them
        self._sent: set[str] = set()
        self._written_by_stock: set[str] = set()  # let go, but a WRITE of the stock half still reads them
        self.stock = StockDecoders(self.endpoint, self._held.get)

    def attach(self, worker: Any) -> None:
        """Another stock worker, with another agent: no WRITE of the old one goes on."""
        self.worker = worker
        for request_id, reference in self._held.items():
            worker.offer_to_stock(request_id, [list(run.block_ids) for run in reference.blocks])

    def take(self, events: Events) -> None:
        """The scheduler's events of one step."""
        self._expected.update(events.expected)
        for done in events.prefilled:
            self._expected.discard(done.name)
            self._grant(done)
        for name, reason in events.aborted.items():
            self._expected.discard(name)
            self.endpoint.prefill_aborted(name, reason)
        parked, self._parked = self._parked, []
        for message in parked:
            self.received(message)

    def _grant(self, done: Prefilled) -> None:
        reference = done.references[self._rank]
        self._held[done.request_id], self._request_ids[done.name] = reference, done.request_id
        runs = reference.blocks
        held = any(run.block_ids for run in runs)
        try:
            self.endpoint.prefilled(done.name, runs, reference.num_tokens, reference=reference)
        except StateError as error:
            logger.error("pdkv: the blocks of request %s are not kept for decode: %s", done.request_id, error)
            held = held and bool(self.freed(done.name))
        if held and done.name in self._request_ids:
            self.worker.offer_to_stock(done.request_id, [list(run.block_ids) for run in runs])
        elif not held:
            self._forget(done.name)

    def received(self, message: Any) -> None:
        """A message from decode. About a prefill that runs it waits: the reference may outrun the scheduler's event."""
        if isinstance(message, Keyed) and message.key.request_id in self._expected and len(self._parked) < _MAX_PARKED:
            self._parked.append(message)
        else:
            self.endpoint.received(message)

    def freed(self, name: str) -> str | None:
        """Nothing of `pdkv.transfer` needs the blocks of this request any more. Idempotent."""
        request_id = self._forget(name)
        if request_id is None:
            return None
        if self.worker.withdraw_from_stock(request_id):
            self._sent.add(request_id)
        else:
            self._written_by_stock.add(request_id)
        return request_id

    def _forget(self, name: str) -> str | None:
        request_id = self._request_ids.pop(name, None)
        if request_id is not None:
            del self._held[request_id]
            self.stock.forget(request_id)
        return request_id

    def sent_to_stock(self, request_ids: Iterable[str]) -> None:
        """The stock half has written these to a stock D."""
        for request_id in request_ids:
            if request_id in self._held:
                self.stock.done(request_id)

    def take_sent(self) -> set[str]:
        """Requests whose blocks the scheduler may free."""
        over = {request_id for request_id in self._written_by_stock if self.worker.withdraw_from_stock(request_id)}
        self._written_by_stock -= over
        sent, self._sent = self._sent | over, set()
        return sent
