"""A rank's half of `PdkvConnector`: a transport over the rank's cache, which does what the scheduler's half orders.

It is driven by vLLM's steps, which vLLM makes as long as a request holds blocks for a peer or waits for KV.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from pdkv.errors import GeometryError, PdkvError, StateError
from pdkv.transfer.first_error import FirstError
from pdkv.transfer.messages import EngineRef, FailCode
from pdkv.transfer.shards import Shards
from pdkv.transfer.transport import Transfer, TransferState, Transport
from pdkv_connectors.vllm.session_orders import (
    Connect,
    Disconnect,
    Failure,
    Offer,
    Order,
    Post,
    RankRegistration,
    Rebuild,
    StepReports,
    Withdraw,
)
from pdkv_connectors.vllm.session_peers import WorkerPeers

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

logger = init_logger(f"vllm.{__name__}")

CLOSE_TIMEOUT_S = 5.0
#: Seconds of a step for a peer that is met for the first time, which most need a few milliseconds of; one that does not
#: answer is looked at once a step from then on.
MEETING_S, MEETING_PAUSE_S = 20e-3, 1e-4
#: Seconds of a step for transfers that move only while they are polled: ipc on the host.
MOVING_S = 5e-3


@dataclass(slots=True)
class _Running:
    """A transfer of this rank: as many as it has counterparts, and what has failed of it so far.

    Attributes:
        since: it was posted; None before that.
    """

    order: Post
    peers: tuple[EngineRef, ...]
    since: float | None = None
    transfers: list[Transfer] = field(default_factory=list)
    failure: Failure | None = None

    def fail(self, error: PdkvError) -> None:
        """It cannot be posted, or not all of it."""
        code = FailCode.INCOMPATIBLE if isinstance(error, GeometryError) else FailCode.POST_FAILED
        self.failure = Failure(f"{type(error).__name__}: {error}", code)


class SessionWorker:
    """Args:
    make_transport: builds one; called again after each sleep and for each rebuilt agent.
    engine_id: of this rank, new at each start.
    shape: see :class:`RankRegistration`.
    num_kv_heads: of the model, over all ranks; 0 where a peer must be exactly like this engine.
    num_ranks: of the engine.
    zero_received: a negative control: what has arrived is zeroed.
    """

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        engine_id: str,
        rank: int,
        *,
        shape: str,
        num_kv_heads: int = 0,
        num_ranks: int = 1,
        zero_received: bool = False,
    ) -> None:
        self._make, self._shape, self._zero = make_transport, shape, zero_received
        self._rank, self._num_ranks, self._num_kv_heads = rank, num_ranks, num_kv_heads
        self._last = EngineRef(engine_id, 0)
        self._cache: GrowableKVCache | None = None
        self._transport: Transport | None = None
        self._peers = WorkerPeers()
        self._running: dict[int, _Running] = {}
        self._moving_s = 0.0  # from posting until the end was seen, of all transfers together
        self._reports = StepReports()
        self._state: dict[str, object] = {}

    @property
    def registration(self) -> RankRegistration:
        """What is registered now.

        Raises:
            StateError: nothing is.
        """
        if self._transport is None or self._cache is None:
            raise StateError("the KV cache of this rank is not registered; it is asleep, or has not been extended yet.")
        cache, transport = self._cache, self._transport
        heads = self._num_kv_heads
        shards = Shards.of(cache.config, heads, self._num_ranks) if heads > 0 else None
        return RankRegistration(
            self._last, transport.describe(), cache.num_committed_blocks, self._shape, shards, transport.converts
        )

    @property
    def transport(self) -> Transport | None:
        """The transport; None while nothing is registered."""
        return self._transport

    def register(self, cache: GrowableKVCache) -> None:
        """Register the committed blocks by a new transport, in the next generation. Raises as transports do."""
        engine = EngineRef(self._last.engine_id, max(self._last.generation + 1, cache.generation))
        transport = self._make()
        try:
            transport.register(cache, engine)
        except BaseException:
            self._transport = transport  # to be closed later where it cannot be now
            FirstError().attempt("close a transport that did not register", self.unregister)
            raise
        self._cache, self._transport, self._last = cache, transport, engine

    def unregister(self) -> None:
        """Destroy the transport's agent, and end what still runs. Idempotent.

        Raises:
            PdkvError: it is not known to be gone, so the memory must stay; unregister() again.
        """
        self._peers.clear()
        self._running.clear()
        if self._transport is not None:
            self._transport.close(timeout_s=CLOSE_TIMEOUT_S)
            self._transport = None

    def work_off(self, orders: list[Order]) -> None:
        """Do what the step orders. What fails is reported, and hurts no other order."""
        if self._transport is not None:
            self._transport.progress()
        for order in orders:
            match order:
                case Connect():
                    self._peers.learn(order.ranks[self._rank])
                case Disconnect():
                    for engine_id in order.engine_ids[self._rank]:
                        self._forget(engine_id)
                case Post():
                    self._post(order)
                case Offer() | Withdraw():
                    self._announce(order)
                case Rebuild():
                    self._rebuild()

    def collect(self) -> StepReports | None:
        """What there is to say since the last step."""
        self._meet_peers()
        until = time.monotonic() + MOVING_S
        for number, running in list(self._running.items()):
            if running.since is None:
                continue
            states = [_poll(transfer, until) for transfer in running.transfers]
            if TransferState.RUNNING in states:
                continue
            del self._running[number]
            self._moving_s += time.monotonic() - running.since
            failed = [transfer for transfer, state in zip(running.transfers, states, strict=True) if state == "failed"]
            failure = running.failure
            if failed and failure is None:
                failure = Failure(failed[0].reason or "the transfer failed", failed[0].code)
            if failure is None and self._zero and running.order.reads:
                self._zero_blocks(running.order)
            self._ended(number, failure)
        self._describe()
        reports, self._reports = self._reports, StepReports()
        return reports or None

    # Parts.

    def _post(self, order: Post) -> None:
        running = self._running[order.number] = _Running(order, order.ranks[self._rank])
        has_begun = False
        try:
            has_begun = self._peers.meet(self._require_transport(), running.peers)
        except PdkvError as error:
            running.fail(error)
        until = time.monotonic() + MEETING_S
        self._meet_peers()
        while has_begun and running.since is None and time.monotonic() < until:
            time.sleep(MEETING_PAUSE_S)
            self._meet_peers()

    def _meet_peers(self) -> None:
        """Go on connecting to peers, and post what has waited for that."""
        errors = self._peers.poll()
        for running in self._running.values():
            if running.since is None:
                for engine_id in {peer.engine_id for peer in running.peers} & errors.keys():
                    running.fail(errors[engine_id])
                if running.failure is not None or not self._peers.awaits(running.peers):
                    self._start(running)

    def _start(self, running: _Running) -> None:
        """Nothing is posted before all counterparts are connected; it has ended when all that was posted has (I11)."""
        running.since = time.monotonic()
        if running.failure is not None:
            return
        try:
            transport = self._require_transport()
            post = transport.read if running.order.reads else transport.write
            for peer in running.peers:
                running.transfers.append(post(peer, running.order.pairs))
        except PdkvError as error:
            running.fail(error)

    def _require_transport(self) -> Transport:
        if self._transport is None:
            raise StateError("the KV cache of this rank is asleep; wake the engine before it reads.")
        return self._transport

    def _announce(self, order: Offer | Withdraw) -> None:
        if self._transport is None:
            return
        try:
            (self._transport.offer if isinstance(order, Offer) else self._transport.withdraw)(order.block_ids)
        except PdkvError as error:  # peers can read them all the same, only later
            logger.warning("pdkv: the transport could not prepare %d blocks: %s", len(order.block_ids), error)

    def _forget(self, engine_id: str) -> None:
        self._peers.forget(engine_id)
        if self._transport is not None:
            self._transport.disconnect(engine_id)

    def _rebuild(self) -> None:
        cache = self._cache
        try:
            self.unregister()
            if cache is None:
                raise StateError("no KV cache was registered, so none can be registered anew.")
            self.register(cache)
            self._reports.rebuilt[self._rank] = self.registration
        except PdkvError as error:
            logger.exception("pdkv: the transport of this rank could not be built again")
            self._reports.rebuilt[self._rank] = str(error)

    def _ended(self, number: int, failure: Failure | None) -> None:
        self._reports.ended.setdefault(number, {})[self._rank] = failure

    def _zero_blocks(self, order: Post) -> None:
        if self._cache is not None:
            for view in self._cache.views().values():
                for pair in order.pairs:
                    view[pair.destination // order.units].zero_()

    def _describe(self) -> None:
        """What operators see, when a transfer has ended or a peer has come."""
        if self._reports or not self._state:
            state: dict[str, Any] = {"registered": False}
            if self._transport is not None:
                state = {**self._transport.describe_state(), "moving_s": round(self._moving_s, 6)}
            if state != self._state:
                self._state = state
                self._reports.state[self._rank] = state


def _poll(transfer: Transfer, until: float) -> TransferState:
    """The state, after moving it as long as `until` allows where polling is what moves it."""
    state = transfer.poll()
    while state is TransferState.RUNNING and transfer.moves_in_poll and time.monotonic() < until:
        state = transfer.poll()
    return state
