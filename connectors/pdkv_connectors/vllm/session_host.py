"""The transport of a session whose caches are in vLLM's workers: it turns calls into orders, and reports into ends.

To peers an engine is one, whatever the number of its ranks: each rank exchanges the same blocks with those ranks of the
other side that have its heads (:func:`pdkv.transfer.shards.parts_of`), and a transfer has ended when it has on every
rank. So one word of D ends P's lease, and it comes when no rank reads any more.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from vllm.logger import init_logger

from pdkv.errors import ConnectorError, GeometryError, ProtocolError, StaleGenerationError, StateError
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.hosting import Registration
from pdkv.transfer.messages import Compatibility, Descriptor, EngineRef
from pdkv.transfer.shards import Shards, parts_of
from pdkv.transfer.transport import Transfer, TransferState
from pdkv.transfer.unpacking import unpack
from pdkv_connectors.vllm.session_orders import (
    Connect,
    Disconnect,
    Failure,
    Offer,
    Order,
    Post,
    Rank,
    RankRegistration,
    Rebuild,
    StepReports,
    Withdraw,
)

logger = init_logger(f"vllm.{__name__}")

MAX_RANKS = 4096


class RankMetadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank, in the metadata that peers get."""

    engine: EngineRef
    metadata: bytes


_encoder = msgspec.msgpack.Encoder()
_Ranks = Annotated[tuple[RankMetadata, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
_decoder = msgspec.msgpack.Decoder(_Ranks)


@dataclass(frozen=True, slots=True)
class _Peer:
    """`ranks`: for each rank here; `units` as in :class:`Post`; `is_alike`: rank i has what rank i has there."""

    ref: EngineRef
    ranks: tuple[tuple[EngineRef, ...], ...]
    units: int
    is_alike: bool


class WorkersTransfer(Transfer):
    """One transfer of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._missing = num_ranks
        self._state = TransferState.RUNNING

    def poll(self) -> TransferState:
        return self._state

    def abandon(self) -> bool:
        return self._state is not TransferState.RUNNING

    def rank_ended(self, failure: Failure | None) -> None:
        """One more rank has ended it."""
        if failure is not None and not self.reason:
            self.reason, self.code = failure.reason, failure.code
        self._missing -= 1
        if self._missing == 0:
            self._state = TransferState.FAILED if self.reason else TransferState.DONE


class WorkersHost:
    """A :class:`pdkv.transfer.TransportHost`. The engine core's thread takes orders and brings reports.

    Args:
        engine_id: of the whole engine.
        compatibility: from what the ranks' caches are like, what peers must have in common with them.
        on_order: called when there is an order; from any thread.
    """

    def __init__(
        self, engine_id: str, compatibility: Callable[[RankRegistration], Compatibility], on_order: Callable[[], None]
    ) -> None:
        self._lock = threading.RLock()
        self._last = EngineRef(engine_id, 0)
        self._compatibility, self._on_order = compatibility, on_order
        self._ranks: dict[int, RankRegistration] = {}
        self._registration: Registration | None = None
        self._rebuilding: dict[int, RankRegistration] | None = None
        self._error: str | None = None
        self._orders: list[Order] = []
        self._peers: dict[str, _Peer] = {}
        self._running: dict[int, WorkersTransfer] = {}
        self._number = 0
        self._state: dict[int, dict[str, object]] = {}
        self.counts: Counter[str] = Counter()

    # The engine core's side.

    def register(self, ranks: Mapping[int, RankRegistration]) -> Registration:
        """What all ranks have registered, from now on in a new generation.

        Raises:
            ConnectorError: the ranks' caches differ, so that one set of block ids does not fit all.
        """
        with self._lock:
            if len({(rank.num_blocks, rank.shape, rank.shards) for rank in ranks.values()}) != 1:
                raise ConnectorError(
                    f"the ranks have {sorted({rank.num_blocks for rank in ranks.values()})} blocks and caches of "
                    f"{len({rank.shape for rank in ranks.values()})} shapes; they must be alike to transfer KV."
                )
            in_order = [ranks[rank] for rank in sorted(ranks)]
            first = replace(in_order[0], converts=all(rank.converts for rank in in_order))
            metadata = _encoder.encode([RankMetadata(rank.engine, rank.metadata) for rank in in_order])
            descriptor = Descriptor(
                compatibility=self._compatibility(first), num_blocks=in_order[0].num_blocks, metadata=metadata
            )
            self._last = EngineRef(self._last.engine_id, self._last.generation + 1)
            self._ranks, self._rebuilding = dict(ranks), None
            self._registration = Registration(self._last, descriptor)
            return self._registration

    def unregister(self) -> None:
        """The workers have let go of their memory, and of all peers."""
        with self._lock:
            self._registration = None
            self._peers.clear()
            self._orders.clear()
            self._end_all("the engine went to sleep")

    def take_orders(self) -> list[Order]:
        with self._lock:
            orders, self._orders = self._orders, []
            return orders

    def take_reports(self, reports: StepReports) -> None:
        with self._lock:
            self._state.update(reports.state)
            for number, of_ranks in reports.ended.items():
                transfer = self._running.get(number)
                if transfer is None:
                    continue  # of an agent that has been rebuilt since
                for rank, failure in of_ranks.items():
                    if failure is not None:
                        logger.warning("pdkv: rank %d: %s", rank, failure.reason)
                    transfer.rank_ended(failure)
                if transfer.poll() is not TransferState.RUNNING:
                    del self._running[number]
                    self.counts["failed" if transfer.reason else "done"] += 1
            for rank, found in reports.rebuilt.items():
                self._rank_rebuilt(rank, found)

    @property
    def num_running(self) -> int:
        """Transfers that the workers have to report on."""
        return len(self._running)

    # The session's side.

    @property
    def registration(self) -> Registration | None:
        if self._error is not None:
            raise ConnectorError(
                f"the KV connector of a worker could not be built again: {self._error}; end the engine."
            )
        return self._registration

    def rebuild(self, *, timeout_s: float) -> None:
        with self._lock:
            self._registration, self._rebuilding = None, {}
            self._peers.clear()
            self._order(Rebuild())
            self._end_all("the agent was rebuilt")
            self.counts["rebuilds"] += 1

    def connect(self, peer: EngineRef, descriptor: Descriptor, *, timeout_s: float) -> None:
        """The workers connect when they need to; where they cannot, the transfer fails."""
        ranks = unpack(_decoder, descriptor.metadata, "the metadata of a peer's ranks")
        with self._lock:
            if self._registration is None:
                raise StateError("the workers have registered no KV cache; wake the engine before it connects.")
            ours, theirs = self._registration.descriptor.compatibility, descriptor.compatibility
            counterparts = self._counterparts(ours.shards, theirs.shards, ranks)
            self._peers[peer.engine_id] = _Peer(
                peer,
                tuple(tuple(rank.engine for rank in of_rank) for of_rank in counterparts),
                units=max(1, ours.block_size // theirs.block_size),
                is_alike=ours.shards == theirs.shards,
            )
            self._order(Connect(counterparts))

    def disconnect(self, engine_id: str) -> None:
        with self._lock:
            if (peer := self._peers.pop(engine_id, None)) is not None:
                self._order(Disconnect(tuple(tuple(rank.engine_id for rank in ranks) for ranks in peer.ranks)))

    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return self._post(peer, pairs, reads=True)

    def write(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return self._post(peer, pairs, reads=False)

    def fences_reads(self, peer: EngineRef) -> bool:
        """No: the workers connect at a later step, each with transports that this process does not know."""
        return False

    def offer(self, block_ids: Sequence[int]) -> None:
        with self._lock:
            self._order(Offer(tuple(block_ids)))

    def withdraw(self, block_ids: Sequence[int]) -> None:
        with self._lock:
            if self._registration is not None:
                self._order(Withdraw(tuple(block_ids)))

    def progress(self) -> None:
        """The workers make progress at each step."""

    needs_progress = False

    def describe_state(self) -> dict[str, Any]:
        with self._lock:
            return {
                "registered": self._registration is not None,
                "peers": sorted(self._peers),
                "running": len(self._running),
                **self.counts,
                "ranks": [self._state[rank] for rank in sorted(self._state)],
            }

    def close(self, *, timeout_s: float) -> None:
        """The workers end with the engine."""
        self.unregister()

    # Parts.

    def _post(self, peer: EngineRef, pairs: Sequence[BlockPair], *, reads: bool) -> Transfer:
        with self._lock:
            known = self._peers.get(peer.engine_id)
            if known is None or known.ref != peer:
                raise StaleGenerationError(
                    f"engine {peer.engine_id!r} in generation {peer.generation} is not connected; handshake again."
                )
            if not reads and not known.is_alike:
                raise GeometryError("blocks are written only between engines of equal tensor parallelism; read them.")
            self._number += 1
            transfer = self._running[self._number] = WorkersTransfer(len(self._ranks))
            self._order(Post(self._number, known.ranks, tuple(pairs), reads, known.units))
            self.counts["reads" if reads else "writes"] += 1
            return transfer

    def _counterparts(
        self, ours: Shards | None, theirs: Shards | None, ranks: Sequence[RankMetadata]
    ) -> tuple[tuple[Rank, ...], ...]:
        """For each rank here the ranks there that have its heads."""
        if ours is None or theirs is None:
            if len(ranks) != len(self._ranks):
                raise GeometryError(
                    f"the peer has {len(ranks)} ranks and this engine {len(self._ranks)}; run both with the same "
                    "tensor parallelism."
                )
            return tuple((Rank(rank.engine, rank.metadata),) for rank in ranks)
        if theirs.num_ranks != len(ranks):
            raise ProtocolError(f"the peer says that it has {theirs.num_ranks} ranks, and describes {len(ranks)}.")
        return tuple(
            tuple(
                Rank(ranks[part.rank].engine, ranks[part.rank].metadata, part.heads)
                for part in parts_of(rank, ours, theirs)
            )
            for rank in sorted(self._ranks)
        )

    def _order(self, order: Order) -> None:
        self._orders.append(order)
        self._on_order()

    def _end_all(self, reason: str) -> None:
        for transfer in self._running.values():
            for _ in self._ranks:
                transfer.rank_ended(Failure(reason))
        self._running.clear()

    def _rank_rebuilt(self, rank: int, found: RankRegistration | str) -> None:
        if isinstance(found, str):
            self._error = found
        elif self._rebuilding is not None:
            self._rebuilding[rank] = found
            if len(self._rebuilding) == len(self._ranks):
                self.register(self._rebuilding)
