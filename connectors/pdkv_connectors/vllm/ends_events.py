"""What the scheduler's half of a connector tells the workers' halves, and what P tells D through the request.

Events travel as an attribute of the stock connector metadata, with the next step. The reference to a prompt's KV is the
key ``pdkv`` of ``kv_transfer_params``, beside the stock fields, which a stock peer reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from pdkv.errors import ConnectorError, ProtocolError
from pdkv.transfer import BlockRun, Reference
from pdkv.transfer.messages import PROTOCOL_VERSION, Count, Digest, EngineRef, Name, Runs, Seconds, Text
from pdkv_connectors.vllm.handshake import KEY, RankInfo

#: Attribute of `NixlConnectorMetadata` that carries :class:`Events`.
ATTRIBUTE = "pdkv_events"
MAX_RANKS = 4096
#: As vLLM's workers keep it.
_Block = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class OneRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What differs between P's ranks. `control`: where the rank listens."""

    engine: EngineRef
    control: Text
    serial: Count
    mac: Digest


class RemoteKV(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the KV of a prompt is: a :class:`pdkv.transfer.Reference` for each rank, with the blocks named once.

    Attributes:
        version: of the protocol that P speaks.
        ranks: P's ranks, in order.
        request_id: the request's name between P and D.
        num_tokens: tokens of the prompt.
        blocks: P's blocks, one run per KV-cache group; the same ids on each rank.
        valid_s: as in the references.
    """

    version: Count
    ranks: Annotated[tuple[OneRank, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    request_id: Name
    num_tokens: Count
    blocks: Runs = ()
    valid_s: Seconds

    @classmethod
    def of(cls, references: Sequence[Reference], ranks: Sequence[RankInfo]) -> RemoteKV:
        """All ranks' references to one prompt."""
        first = references[0]
        return cls(
            version=PROTOCOL_VERSION,
            ranks=tuple(
                OneRank(engine=reference.engine, control=rank.control, serial=reference.serial, mac=reference.mac)
                for reference, rank in zip(references, ranks, strict=True)
            ),
            request_id=first.request_id,
            num_tokens=first.num_tokens,
            blocks=first.blocks,
            valid_s=first.valid_s,
        )

    def reference(self, rank: int) -> Reference:
        """The reference for one rank."""
        one = self.ranks[rank]
        return Reference(
            engine=one.engine,
            request_id=self.request_id,
            num_tokens=self.num_tokens,
            blocks=self.blocks,
            serial=one.serial,
            valid_s=self.valid_s,
            mac=one.mac,
        )


def read_remote_kv(params: dict[str, Any] | None) -> RemoteKV | None:
    """What a pdkv engine has put into `kv_transfer_params`; None where there is nothing of it.

    Raises:
        ProtocolError: it is there and not valid.
        ConnectorError: it is of another version.
    """
    found = (params or {}).get(KEY)
    if found is None:
        return None
    version = found.get("version") if isinstance(found, dict) else None
    if isinstance(version, int) and version != PROTOCOL_VERSION:
        raise ConnectorError(
            f"prefill speaks protocol version {version} and decode {PROTOCOL_VERSION}; run the same pdkv."
        )
    try:
        return msgspec.convert(found, RemoteKV)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the transfer parameters of the request are not valid: {error}") from error


class StockKV(msgspec.Struct, frozen=True, kw_only=True):
    """What a stock prefill engine says of a prompt's KV, under vLLM's names; only what vLLM's connectors rely on."""

    remote_engine_id: Annotated[str, msgspec.Meta(min_length=1)]
    remote_request_id: Annotated[str, msgspec.Meta(min_length=1)]
    remote_host: Annotated[str, msgspec.Meta(min_length=1)]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    tp_size: _Ranks
    dcp_size: _Ranks = 1
    pp_size: _Ranks = 1
    remote_block_ids: tuple[tuple[_Block, ...], ...] | None = None
    remote_num_tokens: Count | None = None
    remote_blocks_expiry_time: float | None = None


def require_stock_kv(params: dict[str, Any], *, with_blocks: bool) -> None:
    """Refuse what vLLM's own connectors take on trust: they end the engine where it is missing.

    Args:
        with_blocks: whether blocks must be named, as in pull.

    Raises:
        ProtocolError: something is missing or of another type.
    """
    try:
        found = msgspec.convert(params, StockKV)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the transfer parameters of the request are not valid: {error}") from error
    if with_blocks and not any(found.remote_block_ids or ()):
        raise ProtocolError("the transfer parameters of the request name no blocks: remote_block_ids is empty.")


#: Without one of them a stock prefill engine loads nothing from the decode engine that names blocks (`reads_back`).
_READ_BACK = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


def reads_back(params: Mapping[str, Any]) -> bool:
    """P, by pull: whether a request names blocks of a decode engine that its prompt begins with.

    So answers a stock decode engine with ``bidirectional_kv_xfer``, for the next prompt of a conversation.
    """
    named = all(name in params for name in _READ_BACK)
    return bool(params.get("do_remote_decode") and params.get("remote_block_ids") and named)


@dataclass(slots=True)
class Arrival:
    """D: a request whose prompt P has computed has reached this engine."""

    request_id: str
    num_tokens: int
    remote: RemoteKV


@dataclass(slots=True)
class Prefilled:
    """P: a prompt's KV is complete. `references`: to it, one a rank, under its name between P and D."""

    request_id: str
    references: tuple[Reference, ...]

    @property
    def name(self) -> str:
        return self.references[0].request_id


@dataclass(slots=True)
class Events:
    """In the order in which they must be worked off. Blocks of `allocated` are the connector's from then on."""

    expected: list[str] = field(default_factory=list)  # P: names of requests whose prefill has begun
    prefilled: list[Prefilled] = field(default_factory=list)
    aborted: dict[str, str] = field(default_factory=dict)  # P: name -> reason
    arrived: list[Arrival] = field(default_factory=list)
    allocated: dict[str, tuple[BlockRun, ...]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)  # D: can their KV be read again?
    gone: dict[str, str] = field(default_factory=dict)  # D: request id -> reason
    # Requests for whose KV nobody is asked, by what they say of it: vLLM is to be told that they have failed; and that
    # it may have the blocks back which some of them have got.
    refused: set[str] = field(default_factory=set)
    untouched: set[str] = field(default_factory=set)


def events_of(metadata: Any) -> Events | None:
    """The events in the metadata of a step; None in that of a warmup step."""
    events: Events | None = getattr(metadata, ATTRIBUTE, None)
    return events


@dataclass(slots=True)
class WorkerNews(KVConnectorWorkerMetadata):
    """What a rank tells the scheduler beside finished transfers.

    Attributes:
        failed: D: request id -> reason, of requests whose KV will not come.
        again: D: of preempted requests, whether prefill still keeps their KV for this rank.
        handshakes: (pipeline rank, tensor rank) -> payload to serve from now on: the agent was rebuilt.
    """

    failed: dict[str, str] = field(default_factory=dict)
    again: dict[str, bool] = field(default_factory=dict)
    handshakes: dict[tuple[int, int], Any] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if not isinstance(other, WorkerNews):
            return self
        again = {key: self.again.get(key, True) and other.again.get(key, True) for key in self.again | other.again}
        return WorkerNews({**self.failed, **other.failed}, again, {**self.handshakes, **other.handshakes})
