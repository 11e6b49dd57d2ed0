"""D's half of a rank's ends: requests whose KV comes from prefill, and when vLLM may have their blocks back.

vLLM fails a request when it is told `failed_recving`, and frees its blocks when it is told `finished_recving`: so the
first is said when the KV is known not to come, and the second when nothing can write to the blocks any more (I11).
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from pdkv.errors import StateError
from pdkv.transfer import Consumer, ConsumerSettings, Descriptor, EngineRef, FailCode, SystemClock
from pdkv_connectors.vllm.ends_events import Arrival, Events, WorkerNews
from pdkv_connectors.vllm.stock_peers import StockLoads

logger = init_logger(f"vllm.{__name__}")

_MAX_ADDRESSES = 4096


class DecodeEnds:
    """Requests between their arrival in the scheduler and `finished_recving`.

    Args:
        worker: the stock worker (`nixl_workers`); replaced when the agent is rebuilt.
    """

    def __init__(
        self, worker: Any, me: EngineRef, descriptor: Descriptor, settings: ConsumerSettings, rank: int
    ) -> None:
        clock = SystemClock()
        self.endpoint = Consumer(clock, me, descriptor, settings, rank=rank)
        self.worker = worker
        self.stock = StockLoads(clock, worker, settings.transfer_s, settings.quarantine.rebuild_after_s)
        self._rank = rank
        self._addresses: dict[str, str] = {}  # engine id of P -> where it listens
        self._awaited: set[str] = set()  # vLLM waits for finished_recving of these
        self._over: dict[str, str] = {}  # have failed, until vLLM has let go of them
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._news: dict[str, str] = {}
        self._again: dict[str, bool] = {}

    def attach(self, worker: Any) -> None:
        """Another stock worker, with another agent: loads from stock engines have ended with the old one."""
        for request_id in self.stock.attach(worker):
            self._failed.add(request_id)
            self._received.add(request_id)
        self.worker = worker

    def address(self, engine_id: str) -> str | None:
        """Where a prefill engine listens."""
        return self._addresses.get(engine_id)

    def arrive(self, events: Events) -> None:
        """Requests that have reached the engine; their leases are renewed from now on."""
        for arrival in events.arrived:
            self._arrive(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        reference = arrival.remote.reference(self._rank)
        self._addresses.pop(reference.engine.engine_id, None)
        self._addresses[reference.engine.engine_id] = arrival.remote.ranks[self._rank].control
        while len(self._addresses) > _MAX_ADDRESSES:  # engines come and go for as long as this one lives
            del self._addresses[next(iter(self._addresses))]
        try:
            self.endpoint.arrived(arrival.request_id, reference, arrival.num_tokens)
        except StateError as error:
            self.give_up(arrival.request_id, FailCode.REPLAYED, str(error))

    def load(self, events: Events) -> None:
        """Requests that have blocks, and such that are over."""
        for request_id, runs in events.allocated.items():
            if any(run.block_ids for run in runs):
                self._awaited.add(request_id)
                if request_id in self._over:
                    self._failed.add(request_id)
            self.endpoint.allocated(request_id, runs)
        for request_id in events.preempted:
            self._again[request_id] = self.endpoint.preempted(request_id)
        for request_id, reason in events.gone.items():
            self._over.pop(request_id, None)
            self.endpoint.gone(request_id, reason)

    def loaded(self, request_id: str) -> None:
        """The KV is there."""
        if request_id in self._awaited:
            self._awaited.discard(request_id)
            self._received.add(request_id)

    freed = loaded  # either way the blocks are vLLM's again, and it is told so once

    def give_up(self, request_id: str, code: str, reason: str) -> None:
        """The KV will not come.

        With several ranks vLLM hears of it only together with `finished_recving`; so it is said again once the request
        has blocks.
        """
        logger.warning("pdkv: the KV of request %s will not come (%s): %s", request_id, code, reason)
        self._over[request_id] = self._news[request_id] = f"{code}: {reason}"
        self._failed.add(request_id)

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests of which vLLM is to be told `finished_recving`, and `failed_recving`."""
        received, self._received = self._received, set()
        failed, self._failed = self._failed | self.stock.newly_failed(), set()
        return received, failed

    def take_news(self) -> WorkerNews:
        """For the scheduler."""
        news, self._news, self._again = WorkerNews(self._news, self._again), {}, {}
        return news
