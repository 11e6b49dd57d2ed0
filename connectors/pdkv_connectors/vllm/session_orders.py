"""What the scheduler's half of `PdkvConnector` has the workers do, and what they say came of it.

Orders travel with a step, reports with its output. Both are vLLM's own channels between the engine core and its
workers; nothing of this reaches another engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.messages import EngineRef, FailCode
from pdkv.transfer.shards import HeadSlice, Shards


@dataclass(frozen=True, slots=True)
class RankRegistration(KVConnectorHandshakeMetadata):
    """The cache of one rank, as its transport has registered it.

    Attributes:
        engine: the rank's own id and generation; transports of peers' ranks know it by these.
        metadata: of the transport.
        num_blocks: committed blocks, the same on all ranks.
        shape: what a block is, in words; the same on all ranks, and on peers unless the transport converts.
        shards: how the model's KV heads lie on the ranks; None where a peer must have them exactly so.
        converts: whether the transport can convert.
    """

    engine: EngineRef
    metadata: bytes
    num_blocks: int
    shape: str
    shards: Shards | None = None
    converts: bool = False


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of a peer, and which of its heads go to, or come from, one rank here; None where all do, to all."""

    engine: EngineRef
    metadata: bytes
    heads: HeadSlice | None = None


@dataclass(frozen=True, slots=True)
class Connect:
    """Make the ranks of a peer known: for each rank here, those there that it exchanges blocks with."""

    ranks: tuple[tuple[Rank, ...], ...]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Forget the ranks of a peer; as in :class:`Connect`."""

    engine_ids: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Post:
    """Start a transfer: the same pairs with each of a rank's counterparts.

    Attributes:
        ranks: as in :class:`Connect`.
        units: how many units of the pairs a block here has.
    """

    number: int
    ranks: tuple[tuple[EngineRef, ...], ...]
    pairs: tuple[BlockPair, ...]
    reads: bool
    units: int = 1


@dataclass(frozen=True, slots=True)
class Offer:
    """These blocks are complete and will be read by a peer; transports that can, prepare them."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """These blocks are free again, and may be written."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Destroy the transport's agent, and register by a new one."""


Order = Connect | Disconnect | Post | Offer | Withdraw | Rebuild


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):
    """Of one step, in order.

    Attributes:
        sent, received, failed: request ids that the workers are to report to vLLM's scheduler, which takes them from
            nobody else: blocks of P may be freed; KV has arrived, or what had been allocated for it is free; and of
            these, where it has not.
    """

    orders: list[Order] = field(default_factory=list)
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.orders or self.sent or self.received)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank's part of a transfer was not done."""

    reason: str
    code: FailCode = FailCode.TRANSFER_FAILED


@dataclass(slots=True)
class StepReports(KVConnectorWorkerMetadata):
    """What has become of orders, of one rank or, aggregated, of several.

    Attributes:
        ended: number of the transfer -> rank -> what failed; None where nothing did.
        rebuilt: rank -> what it has registered anew, or the error that kept it from that.
        state: rank -> what the transport says of itself, when it has changed.
    """

    ended: dict[int, dict[int, Failure | None]] = field(default_factory=dict)
    rebuilt: dict[int, RankRegistration | str] = field(default_factory=dict)
    state: dict[int, dict[str, object]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.ended or self.rebuilt or self.state)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if isinstance(other, StepReports):
            for number, of_ranks in other.ended.items():
                self.ended.setdefault(number, {}).update(of_ranks)
            self.rebuilt.update(other.rebuilt)
            self.state.update(other.state)
        return self
