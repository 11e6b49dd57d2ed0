"""What the transfer code asks its host to do. The host does it, and reports back by calling a method."""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.messages import Descriptor, EngineRef, FailCode, Message, TransferKey


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to an engine over the side channel, which may lose, delay, repeat or reorder it."""

    engine_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class AddPeer:
    """A peer was met, or met again with new memory: drop what is known of `replaces`, then add `descriptor.metadata`.

    So also where it could not be reached before, and something is to be written to it: `replaces` is then the same.
    Comes before any transfer with that peer.
    """

    peer: EngineRef
    descriptor: Descriptor
    replaces: EngineRef | None


@dataclass(frozen=True, slots=True)
class PostRead:
    """On D: read blocks from P. Then call ``Consumer.read_ended`` once, also when it cannot be posted."""

    key: TransferKey
    peer: EngineRef
    pairs: tuple[BlockPair, ...]


@dataclass(frozen=True, slots=True)
class AbandonRead:
    """On D: nobody wants this READ any more. Where it can be ended now, do, and call ``Consumer.read_ended``."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class PostWrite:
    """On P: write blocks to D. Then call ``Producer.write_ended`` once, also when it cannot be posted."""

    key: TransferKey
    peer: EngineRef
    pairs: tuple[BlockPair, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """On D: the KV of a request has arrived and is whole. Its blocks are the engine's from here on."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Failed:
    """On D: the request must end with an error. Its blocks follow in a :class:`FreeBlocks`, maybe later."""

    request_id: str
    code: FailCode
    reason: str


@dataclass(frozen=True, slots=True)
class Recompute:
    """On D: the prompt must be computed here, in **other** blocks. The old ones follow in a :class:`FreeBlocks`."""

    request_id: str
    code: FailCode
    reason: str


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Nothing reads or writes these blocks any more on behalf of a transfer: the pool may have them back."""

    request_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RebuildAgent:
    """Destroy the transport's agent and build a new one: the only way to stop a transfer that does not end.

    Then call ``agent_rebuilt``.
    """

    reason: str


Action = Send | AddPeer | PostRead | AbandonRead | PostWrite | Loaded | Failed | Recompute | FreeBlocks | RebuildAgent
