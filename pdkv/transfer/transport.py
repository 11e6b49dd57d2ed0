"""The contract of a transport: it moves blocks between the KV caches of two engines.

Callers name blocks, never addresses. A transport registers the extents of a committed cache, says in bytes what a peer
must know to reach them, and moves pairs of blocks, all layers of each, from one cache to the other. Everything that can
be checked is checked before anything is posted: the peer's generation, block ids against both committed counts, and
whether bytes of one cache mean the same in the other (or can be converted on the way).

Transports: ``inproc`` (both caches in one process; for tests), and in `pdkv_connectors`: ``nixl``, ``ipc``, ``ucx``.
:class:`pdkv.transfer.base.TransportBase` has what they share. `pdkv.testing.check_transport` is the executable form of
this contract.

One thread drives a transport. No call waits but :meth:`Transfer.wait`, :meth:`Transport.connect` and
:meth:`Transport.close`, which have deadlines.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pdkv.errors import TransferTimeoutError
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.connecting import Connecting
from pdkv.transfer.messages import EngineRef, FailCode
from pdkv.transfer.shards import HeadSlice

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

#: A transfer is polled after this, then each time after so many times longer, up to the longest: small ones take
#: microseconds, and an end is to be seen soon.
SHORTEST_PAUSE_S = 20e-6
POLL_GROWTH = 1.25
LONGEST_PAUSE_S = 1e-3


class TransferState(StrEnum):
    """Where a transfer is. Only RUNNING may still touch memory."""

    RUNNING = "running"
    DONE = "done"  # every byte is at its destination
    FAILED = "failed"  # nothing of it is in flight; the destination's contents are undefined


class Transfer(ABC):
    """One posted READ or WRITE."""

    #: What failed, one sentence; empty unless the state is FAILED.
    reason: str = ""
    #: Which kind of failure it was.
    code: FailCode = FailCode.TRANSFER_FAILED

    @abstractmethod
    def poll(self) -> TransferState:
        """The state now, after making what progress can be made without waiting."""

    @property
    def moves_in_poll(self) -> bool:
        """Whether :meth:`poll` itself moves or sums bytes, some milliseconds' worth: a pause then is lost."""
        return False

    def wait(self, timeout_s: float) -> TransferState:
        """Poll, with back-off unless polling itself moves it, until the transfer has ended.

        Raises:
            TransferTimeoutError: it still runs. Its destination may still be written: quarantine the blocks.
        """
        deadline, pause_s = time.monotonic() + timeout_s, SHORTEST_PAUSE_S
        while (state := self.poll()) is TransferState.RUNNING:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeoutError(
                    f"a transfer has not ended within {timeout_s:g} s; it may still write, so keep its destination "
                    "blocks out of use until it has ended or its transport is closed."
                )
            if self.moves_in_poll:
                pause_s = SHORTEST_PAUSE_S
                continue
            time.sleep(min(pause_s, left))
            pause_s = min(POLL_GROWTH * pause_s, LONGEST_PAUSE_S)
        return state

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
    #: Whether a transfer is done only when what has arrived is what the side that has the blocks has summed. One that
    #: is not fails, and `describe_state()` counts it under "checksum_failures" on the receiving side.
    verifies: bool = False

    @abstractmethod
    def register(
        self, cache: GrowableKVCache, engine: EngineRef, *, groups: Sequence[Sequence[str]] | None = None
    ) -> None:
        """Register the extents of the committed prefix, each by itself (I5, I6). Once until :meth:`unregister`.

        Args:
            engine: this engine, in the generation of its memory; peers name it in what they post (I10).
            groups: names of the layers of each KV-cache group; by default all layers are one group.

        Raises:
            StateError: registered already, closed, or nothing is committed.
            ConfigError: the groups do not name each layer once.
            TransportError: the transport refused.
        """

    @abstractmethod
    def unregister(self) -> None:
        """Drop every registration, peer and mapping, so that the memory can be released. Idempotent.

        When it returns no peer reaches the memory any more, whatever it knows: where the transport cannot promise this
        by itself, it destroys its agent.

        Raises:
            StateError: a transfer of this side still runs.
            PdkvError: something could not be dropped; the rest was. Keep the memory, and call again.
        """

    @abstractmethod
    def describe(self) -> bytes:
        """What a peer needs to connect: its geometry and the transport's own, at most 1 MiB. Opaque to the caller.

        Raises:
            StateError: nothing is registered.
        """

    @abstractmethod
    def connect(
        self, peer: EngineRef, metadata: bytes, *, timeout_s: float = 5.0, heads: HeadSlice | None = None
    ) -> None:
        """Make `peer` reachable by what its :meth:`describe` returned. One of an older generation is dropped.

        Transfers that run with the older one go on to their end.

        Args:
            heads: which heads of each page move, source being the peer; all of them unless told.

        Raises:
            StateError: nothing is registered here.
            GeometryError: the caches do not fit together, or heads are named to a transport that does not convert; the
                message names the first difference.
            ProtocolError: the metadata is malformed.
            TransportError: it is another transport's, or the peer cannot be reached from here.
            StaleGenerationError: it is of another engine or generation than `peer`, or a newer one is connected.
            TransferTimeoutError: the peer did not answer.
        """

    def begin_connect(
        self, peer: EngineRef, metadata: bytes, *, timeout_s: float = 5.0, heads: HeadSlice | None = None
    ) -> Connecting | None:
        """As :meth:`connect`, for whoever cannot wait: what comes of it is seen by polling.

        None where the peer is connected already, as by a transport that has nothing to wait for. The next one for the
        same engine, :meth:`disconnect`, :meth:`unregister` and :meth:`close` abandon one that has not ended. Raises as
        :meth:`connect` does, or lets :meth:`Connecting.poll` do so.
        """
        self.connect(peer, metadata, timeout_s=timeout_s, heads=heads)
        return None

    @abstractmethod
    def disconnect(self, engine_id: str) -> None:
        """Forget a peer in every generation, and let go of what was imported from it. Idempotent.

        Transfers that run with it go on to their end, and only then is it let go of.
        """

    @abstractmethod
    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        """Post a READ of the peer's `source` blocks into our `destination` blocks, all layers of each group.

        Where blocks differ in size, pairs name units; see :class:`pdkv.transfer.blocks.BlockPair`.

        Raises:
            StateError: nothing is registered here.
            StaleGenerationError: the peer is connected in another generation, or not at all.
            ProtocolError: a block id is not committed on its side, or occurs twice as a destination.
            TransportError: the transport does not take it.
        """

    @abstractmethod
    def write(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        """Post a WRITE of our `source` blocks into the peer's `destination` blocks. Raises as :meth:`read` does."""

    def fences_reads(self, peer: EngineRef) -> bool:
        """Whether a READ from this peer may be posted before the peer has said that it still holds the blocks.

        Two things are needed. The owner's side itself keeps a READ from what it has taken back, before a byte of it
        moves (I10), so that nobody need have asked it. And nothing but this side keeps a READ from ending, so that one
        from an owner that is gone or hangs leaves no blocks in quarantine. False where it is not known, as of a peer
        that is not connected in just this generation; raises nothing.

        While the peer is connected the answer stays the same, whatever the peer does meanwhile: it is asked for once.
        """
        return False

    def offer(self, block_ids: Sequence[int]) -> None:
        """These blocks are complete, and peers are going to read them: prepare what makes that fast.

        Nobody has to; what was not offered can be read all the same.
        """
        return

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """These blocks may be written from now on; said before anybody writes what had been offered."""
        return

    def progress(self) -> None:
        """Serve peers, as far as that takes this side's part: what they read and write goes on while this is called.

        To be called often while peers may read or write here, from the thread that drives the transport.
        """
        return

    @property
    def needs_progress(self) -> bool:
        """Whether somebody waits for :meth:`progress` now, or may without this side's knowing of it."""
        return type(self).progress is not Transport.progress

    @abstractmethod
    def describe_state(self) -> dict[str, Any]:
        """For operators: what is registered, who is connected, what is really used below, what ran and failed.

        Plain values. "transport" is the name, "registered" whether something is, "peers" the engine ids.
        """

    @abstractmethod
    def close(self, *, timeout_s: float = 5.0) -> None:
        """Unregister and let go of everything. Idempotent. What may still run is ended by force.

        Raises:
            PdkvError: something could not be ended; the rest was. Keep the memory, and close() again.
        """
