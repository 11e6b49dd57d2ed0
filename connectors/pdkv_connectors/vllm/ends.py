"""The worker's half of pdkv's ends: one rank's `Producer` and `Consumer`, driven by vLLM's steps and by a thread.

The endpoints of `pdkv.transfer` decide; this carries events to them and does what they answer. Steps bring the
scheduler's events and take away what has ended. Between steps, and while the engine is idle and takes none, the thread
of the control channel receives messages, does what is due, and polls NIXL: an emulated transport moves bytes only while
both sides poll, also those of a peer that reads late.

All access to endpoints and transfers is under one lock. No call waits for a peer.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from pdkv.errors import PdkvError, ProtocolError, TransportError
from pdkv.transfer import ConsumerSettings, Descriptor, EngineRef, FailCode, ProducerSettings
from pdkv.transfer import actions as do
from pdkv.transfer.clock import earliest
from pdkv.transfer.messages import decode, encode
from pdkv_connectors.vllm.block_transfers import BlockTransfers
from pdkv_connectors.vllm.control import Arrived, ControlChannel
from pdkv_connectors.vllm.ends_agent import AgentComesAndGoes
from pdkv_connectors.vllm.ends_decode import DecodeEnds
from pdkv_connectors.vllm.ends_events import Events, WorkerNews
from pdkv_connectors.vllm.ends_prefill import PrefillEnds
from pdkv_connectors.vllm.handshake import RankInfo
from pdkv_connectors.vllm.stock_peers import STOCK

if TYPE_CHECKING:
    from pdkv.transfer.endpoint import Endpoint

logger = init_logger(f"vllm.{__name__}")

#: Longest wait of the thread in seconds: while transfers run; and else, for the sake of peers whose reads need polls.
BUSY_WAIT_S = 0.005
IDLE_WAIT_S = 0.05
_SHORTEST_WAIT_S = 0.001


class WorkerEnds(AgentComesAndGoes):
    """Args:
    worker: the stock worker (`nixl_workers`), registered.
    descriptor: what peers must know of this rank; its metadata is the stock agent metadata.
    role: "kv_producer", "kv_consumer" or "kv_both".
    settings: of decode; mode, lease and quarantine are those of both sides.
    host: where prefill listens for decode.
    report: called with :meth:`snapshot` when it has changed.
    """

    def __init__(
        self,
        worker: Any,
        descriptor: Descriptor,
        *,
        role: str,
        settings: ConsumerSettings,
        host: str,
        generation: int,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._lock = threading.RLock()
        self._mode, self._report = settings.mode, report
        rank = worker.transfer_tp_rank
        name = f"{worker.engine_id[:200]}/{uuid.uuid4().hex[:12]}/{rank}"
        self._me = EngineRef(f"{name}/{'d' if role == 'kv_consumer' else 'p'}", generation)
        self._prefill = self._decode = None
        if role != "kv_consumer":
            shared = {"lease": settings.lease, "quarantine": settings.quarantine}
            self._prefill = PrefillEnds(worker, self._me, descriptor, ProducerSettings(**shared), rank)
        if role != "kv_producer":
            self._decode = DecodeEnds(worker, EngineRef(f"{name}/d", generation), descriptor, settings, rank)
        self._worker: Any = worker
        self._transfers = BlockTransfers(worker)
        self._handshakes: dict[tuple[int, int], Any] = {}
        self._device_is_set = False
        self._rebuild_wanted: str | None = None
        self._reported: dict[str, Any] = {}
        self._channel = ControlChannel(host if self._prefill else None, f"{name}/d", self._round)
        worker.ends = self

    def start(self) -> None:
        """Begin to listen and to poll."""
        self._channel.start()

    def close(self) -> None:
        """Stop listening and polling. Idempotent."""
        self._channel.close()

    @property
    def info(self) -> RankInfo:
        """What to put into the handshake."""
        return RankInfo(
            engine_id=self._me.engine_id, generation=self._endpoints[0].me.generation, control=self._channel.address
        )

    # From and to the scheduler, once a step.

    def take(self, events: Events) -> None:
        """What must not wait for the step's forward: peers ask about it already."""
        with self._lock:
            if self._prefill is not None:
                self._prefill.take(events)
            if self._decode is not None:
                self._decode.arrive(events)
            self._act()

    def load(self, events: Events) -> None:
        """What touches blocks or lets go of them: after the step's zeroing of new blocks has been issued."""
        if self._decode is not None and (events.allocated or events.preempted or events.gone):
            with self._lock:
                self._decode.load(events)
                self._act()

    def collect(self, results: Any) -> None:
        """Add what has ended to `results` (`KVConnectorTransferResults`)."""
        with self._lock:
            if self._prefill is not None:
                self._prefill.sent_to_stock(self._worker.sent_to_stock(results.finished_sending))
            self._poll()
            self._act()
            if self._prefill is not None:
                results.finished_sending |= self._prefill.take_sent()
            if self._decode is not None:
                received, failed = self._decode.take_received()
                results.finished_recving |= received
                results.failed_recving |= failed

    def take_news(self) -> WorkerNews | None:
        """What the scheduler must know beside that."""
        with self._lock:
            news = WorkerNews() if self._decode is None else self._decode.take_news()
            news.handshakes, self._handshakes = self._handshakes, {}
            return news if news.failed or news.again or news.handshakes else None

    # From stock peers, by way of the stock worker.

    def stock_heartbeat(self, request_ids: Iterable[str]) -> None:
        """A stock D still wants these."""
        if self._prefill is not None:
            with self._lock:
                self._prefill.stock.heartbeat(request_ids)
                self._act()

    def stock_done(self, request_id: str, consumers: int) -> None:
        """One of `consumers` ranks of a stock D has read this request."""
        if self._prefill is not None:
            with self._lock:
                self._prefill.stock.done(request_id, consumers)
                self._act()

    # The thread.

    def _round(self, arrived: Arrived) -> float:
        with self._lock:
            self._set_device()
            self._receive(arrived)
            if self._worker is not None:
                self._worker.make_progress()
            self._poll()
            for endpoint in self._endpoints:
                endpoint.tick()
            self._act()
            self._publish()
            busy = len(self._transfers) > 0
            deadline = earliest(*(endpoint.next_deadline() for endpoint in self._endpoints))
        wait_s = BUSY_WAIT_S if busy else IDLE_WAIT_S
        return wait_s if deadline is None else max(_SHORTEST_WAIT_S, min(wait_s, deadline - time.monotonic()))

    def _set_device(self) -> None:
        """In this thread, once: without a device's context UCX silently leaves out what moves bytes between cards."""
        if not self._device_is_set and self._worker is not None:
            self._device_is_set = True
            if not current_platform.is_cpu():
                current_platform.set_device(torch.device(current_platform.device_type, self._worker.device_id))

    def _receive(self, arrived: Arrived) -> None:
        if self._prefill is not None:
            for frame in arrived.for_prefill:
                if (message := _decoded(self._prefill.endpoint, frame)) is not None:
                    self._prefill.received(message)
        if self._decode is not None:
            for frame in arrived.for_decode:
                if (message := _decoded(self._decode.endpoint, frame)) is not None:
                    self._decode.endpoint.received(message)
            for engine_id in arrived.lost:
                self._decode.endpoint.peer_lost(engine_id, FailCode.PEER_LOST, "the connection to prefill is down")

    # What the endpoints want done.

    @property
    def _endpoints(self) -> list[Endpoint]:
        return [side.endpoint for side in (self._prefill, self._decode) if side is not None]

    def _poll(self) -> None:
        for ended in self._transfers.poll():
            self._ended(ended.key, ended.ok)

    def _ended(self, key: Any, ok: bool, code: FailCode = FailCode.TRANSFER_FAILED, reason: str = "") -> None:
        if self._mode == "pull" and self._decode is not None:
            self._decode.endpoint.read_ended(key, ok, code=code, reason=reason)
        elif self._prefill is not None:
            self._prefill.endpoint.write_ended(key, ok, code=code, reason=reason)

    def _act(self) -> None:
        """Do all that is wanted; doing it may make more."""
        pending = True
        while pending:
            pending = False
            for endpoint in self._endpoints:
                for action in endpoint.take_actions():
                    pending = True
                    self._do(endpoint, action)

    def _do(self, endpoint: Endpoint, action: do.Action) -> None:
        decode = self._decode if self._decode is not None and endpoint is self._decode.endpoint else None
        match action:
            case do.Send():
                if action.engine_id != STOCK.engine_id:
                    address = None if decode is None else decode.address(action.engine_id)
                    self._channel.send(action.engine_id, address, encode(action.message))
            case do.AddPeer():
                self._add_peer(endpoint, action)
            case do.PostRead() | do.PostWrite():
                self._post(endpoint, action)
            case do.RebuildAgent():
                self._rebuild_wanted = action.reason
            case do.Loaded() if decode is not None:
                decode.loaded(action.request_id)
            case do.Failed() | do.Recompute() if decode is not None:
                decode.give_up(action.request_id, action.code, action.reason)
            case do.FreeBlocks():
                (decode or self._prefill).freed(action.request_id)  # type: ignore[union-attr]

    def _add_peer(self, endpoint: Endpoint, action: do.AddPeer) -> None:
        moves_bytes = self._decode if self._mode == "pull" else self._prefill
        if moves_bytes is None or endpoint is not moves_bytes.endpoint:
            return
        try:
            self._transfers.add_peer(action.peer, action.descriptor.metadata)
        except TransportError as error:
            # Its transfers are refused when they are posted, each with its request's id.
            endpoint.counters.count("peers_refused_by_transport")
            logger.error("pdkv: %s", error)

    def _post(self, endpoint: Endpoint, action: do.PostRead | do.PostWrite) -> None:
        operation = "READ" if isinstance(action, do.PostRead) else "WRITE"
        try:
            self._transfers.post(operation, action.key, action.peer, action.pairs)
        except PdkvError as error:
            endpoint.counters.count("posts_refused_by_transport")
            logger.error("pdkv: %s", error)
            self._ended(action.key, False, FailCode.POST_FAILED, str(error))

    # What operators see.

    def snapshot(self) -> dict[str, Any]:
        """Counters and gauges of both sides, as in the status file."""
        with self._lock:
            state: dict[str, Any] = {
                "transfers": len(self._transfers),
                "control_dropped": self._channel.dropped,
                "failed_rounds": self._channel.failed_rounds,
            }
            for name, side in (("prefill", self._prefill), ("decode", self._decode)):
                if side is not None:
                    state[name] = _describe(side.endpoint)
            return state

    def _publish(self) -> None:
        if (state := self.snapshot()) != self._reported:
            self._reported = state
            self._report(state)


def _describe(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "generation": endpoint.me.generation,
        "held_requests": len(endpoint.holders()),
        "quarantined_blocks": endpoint.quarantine.num_blocks,
        "quarantine_age_s": int(endpoint.quarantine.oldest_age_s),
        "counters": endpoint.counters.as_dict(),
    }


def _decoded(endpoint: Endpoint, frame: bytes) -> Any:
    """The message in a frame; None, and counted, where there is none that is valid."""
    try:
        return decode(frame)
    except ProtocolError as error:
        endpoint.counters.count("malformed_messages")
        logger.warning_once("pdkv: %s", error)
        return None
