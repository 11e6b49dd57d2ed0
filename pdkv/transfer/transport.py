"""The contract of a transport: it moves blocks between the KV caches of two engines.

Callers name blocks, never addresses. A transport registers the extents of a committed cache, says in bytes what a peer
must know to reach them, and moves pairs of blocks, all layers of each, from one cache to the other. Everything that can
be checked is checked before anything is posted: the peer's generation, block ids against both committed counts, and
whether bytes of one cache mean the same in the other (or can be converted on the way).

Transports: ``inproc`` (both caches in one process; for tests), and in `pdkv_connectors`: ``nixl``, ``ipc``, ``ucx``.
`pdkv.testing.check_transport` is the executable form of this contract.

One thread drives a transport. No call waits but :meth:`Transfer.wait`, :meth:`Transport.connect` and
:meth:`Transport.close`, which have deadlines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.messages import EngineRef

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache


class TransferState(StrEnum):
    """Where a transfer is. Only RUNNING may still touch memory."""

    RUNNING = "running"
    DONE = "done"  # every byte is at its destination
    FAILED = "failed"  # nothing of it is in flight; the destination's contents are undefined


class Transfer(ABC):
    """One posted READ or WRITE."""

    #: What failed, one sentence; empty unless the state is FAILED.
    reason: str = ""

    @abstractmethod
    def poll(self) -> TransferState:
        """The state now, after making what progress can be made without waiting."""

    @abstractmethod
    def wait(self, timeout_s: float) -> TransferState:
        """Poll, with back-off, until the transfer has ended.

        Raises:
            TransferTimeoutError: it still runs. Its destination may still be written: quarantine the blocks.
        """

    @abstractmethod
    def abandon(self) -> bool:
        """Nobody wants the transfer any more. Whether it has ended for certain.

        False: it may still write, and ends only when :meth:`poll` says so or the transport is closed (I11).
        """


class Transport(ABC):
    """See the module's docstring. A failed call leaves everything as it was before it."""

    #: "inproc", "nixl", "ipc", "ucx"; also in logs and metrics.
    name: str
    #: Whether READ (pull) and WRITE (push) can be posted.
    can_read: bool
    can_write: bool
    #: Whether geometries that differ in block size, layout, heads or dtype can be converted on the way.
    converts: bool

    @abstractmethod
    def register(self, cache: GrowableKVCache, engine: EngineRef) -> None:
        """Register the extents of the committed prefix, each by itself (I5, I6). Once until :meth:`unregister`.

        Args:
            engine: this engine, in the generation of its memory; peers name it in what they post (I10).

        Raises:
            StateError: registered already.
            TransportError: the transport refused.
        """

    @abstractmethod
    def unregister(self) -> None:
        """Drop every registration, peer and mapping, so that the memory can be released. Idempotent.

        When it returns no peer reaches the memory any more, whatever it knows: where the transport cannot promise this
        by itself, it destroys its agent.

        Raises:
            StateError: a transfer still runs.
        """

    @abstractmethod
    def describe(self) -> bytes:
        """What a peer needs to connect: its geometry and the transport's own, at most 1 MiB. Opaque to the caller."""

    @abstractmethod
    def connect(self, peer: EngineRef, metadata: bytes, *, timeout_s: float = 5.0) -> None:
        """Make `peer` reachable by what its :meth:`describe` returned. One of an older generation is dropped.

        Raises:
            GeometryError: the caches do not fit together; the message names the first difference.
            TransportError: the metadata is not this transport's, or the peer cannot be reached from here.
            TransferTimeoutError: the peer did not answer.
        """

    @abstractmethod
    def disconnect(self, engine_id: str) -> None:
        """Forget a peer in every generation, and let go of what was imported from it. Idempotent."""

    @abstractmethod
    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        """Post a READ of the peer's `source` blocks into our `destination` blocks, all layers of each group.

        Raises:
            StaleGenerationError: the peer is connected in another generation, or not at all.
            ProtocolError: a block id is not committed on its side, or occurs twice as a destination.
            TransportError: the transport does not take it.
        """

    @abstractmethod
    def write(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        """Post a WRITE of our `source` blocks into the peer's `destination` blocks. Raises as :meth:`read` does."""

    @abstractmethod
    def describe_state(self) -> dict[str, Any]:
        """For operators: name, registered extents and bytes, peers, what is really used below, what ran and failed."""

    @abstractmethod
    def close(self, *, timeout_s: float = 5.0) -> None:
        """Unregister and let go of everything. Idempotent. What may still run is ended by force."""
