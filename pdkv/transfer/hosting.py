"""What a session moves blocks with: a transport that is registered, can be destroyed, and can be built again.

A transfer that does not end is stopped by one thing only, the end of the transport's agent, and memory that is to be
released must have no agent that could serve it. So a session does not keep a transport but a :class:`TransportHost`.
:class:`LocalHost` is the one for an engine whose cache is in this process; an engine that keeps its caches in other
processes has one that asks them, and its registrations come later than the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pdkv.errors import StateError
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.connecting import Connecting
from pdkv.transfer.first_error import FirstError
from pdkv.transfer.messages import Compatibility, Descriptor, EngineRef
from pdkv.transfer.transport import Transfer, Transport

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache


@dataclass(frozen=True, slots=True)
class Registration:
    """A cache that peers can reach: as which engine and generation, and what they must know of it."""

    engine: EngineRef
    descriptor: Descriptor


class TransportHost(Protocol):
    """No call but :meth:`rebuild` and :meth:`close` waits. What is read and written is as in :class:`Transport`."""

    @property
    def registration(self) -> Registration | None:
        """What is registered now; None while there is nothing, and while it is being built again.

        Raises:
            PdkvError: it could not be built.
        """

    def rebuild(self, *, timeout_s: float) -> None:
        """Destroy the agent, and with it every transfer, and register anew, in a higher generation."""

    def connect(self, peer: EngineRef, descriptor: Descriptor, *, timeout_s: float) -> Connecting | None:
        """As :meth:`Transport.begin_connect`."""

    def disconnect(self, engine_id: str) -> None: ...

    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer: ...

    def write(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer: ...

    def fences_reads(self, peer: EngineRef) -> bool: ...

    def offer(self, block_ids: Sequence[int]) -> None: ...

    def withdraw(self, block_ids: Sequence[int]) -> None: ...

    def progress(self) -> None: ...

    @property
    def needs_progress(self) -> bool:
        """Whether peers that read and write here rely on :meth:`progress`."""

    def describe_state(self) -> dict[str, Any]: ...

    def close(self, *, timeout_s: float) -> None:
        """Destroy the agent; nobody reaches the memory any more. Idempotent.

        Raises:
            PdkvError: it is not known to be gone; keep the memory, and close() again.
        """


class LocalHost:
    """A transport over a cache in this process.

    Args:
        make_transport: builds one, without registering anything.
        compatibility: what must be equal on both sides, beyond the geometry that the transport checks.
        groups: as in :meth:`Transport.register`.
        generation: of the first registration; each further one adds at least 1.

    Raises:
        TransportError: the transport cannot be built, or refuses the cache.
        StateError: the cache has no committed block.
    """

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        cache: GrowableKVCache,
        engine_id: str,
        compatibility: Compatibility,
        *,
        groups: Sequence[Sequence[str]] | None = None,
        generation: int = 1,
    ) -> None:
        self.cache = cache
        self._make, self._compatibility, self._groups = make_transport, compatibility, groups
        self._last = EngineRef(engine_id, generation - 1)
        self._transport: Transport | None = None
        self._registration: Registration | None = None
        self.register()

    @property
    def registration(self) -> Registration | None:
        return self._registration

    def register(self) -> Registration:
        """Build a transport and register the cache, in the next generation.

        Raises as the constructor does, and then nothing is registered.
        """
        if self._transport is not None:
            raise StateError("the cache is registered already; close() first.")
        engine = EngineRef(self._last.engine_id, max(self._last.generation + 1, self.cache.generation))
        transport = self._make()
        try:
            transport.register(self.cache, engine, groups=self._groups)
            metadata = transport.describe()
        except BaseException:
            self._transport = transport  # to be closed later where it cannot be now
            FirstError().attempt("close a transport that did not register", self.close)
            raise
        descriptor = Descriptor(
            compatibility=self._compatibility, num_blocks=self.cache.num_committed_blocks, metadata=metadata
        )
        self._transport, self._last = transport, engine
        self._registration = Registration(engine, descriptor)
        return self._registration

    def rebuild(self, *, timeout_s: float) -> None:
        self.close(timeout_s=timeout_s)
        self.register()

    def connect(self, peer: EngineRef, descriptor: Descriptor, *, timeout_s: float) -> Connecting | None:
        return self._require().begin_connect(peer, descriptor.metadata, timeout_s=timeout_s)

    def disconnect(self, engine_id: str) -> None:
        if self._transport is not None:
            self._transport.disconnect(engine_id)

    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return self._require().read(peer, pairs)

    def write(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return self._require().write(peer, pairs)

    def fences_reads(self, peer: EngineRef) -> bool:
        return self._transport is not None and self._transport.fences_reads(peer)

    def offer(self, block_ids: Sequence[int]) -> None:
        self._require().offer(block_ids)

    def withdraw(self, block_ids: Sequence[int]) -> None:
        if self._transport is not None:
            self._transport.withdraw(block_ids)

    def progress(self) -> None:
        if self._transport is not None:
            self._transport.progress()

    @property
    def needs_progress(self) -> bool:
        return self._transport is not None and self._transport.needs_progress

    def describe_state(self) -> dict[str, Any]:
        return {"registered": False} if self._transport is None else self._transport.describe_state()

    def close(self, *, timeout_s: float = 5.0) -> None:
        self._registration = None
        if self._transport is not None:
            self._transport.close(timeout_s=timeout_s)
            self._transport = None

    def _require(self) -> Transport:
        if self._transport is None:
            raise StateError("no cache is registered with a transport; the engine is asleep, or closed.")
        return self._transport
