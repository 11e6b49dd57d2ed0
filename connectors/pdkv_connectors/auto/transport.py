"""The contract of a transport, by the one that was chosen for each peer: ipc on the same host, else nixl, else ucx.

What can be used here is registered (`makers`). A peer's description holds those of all its transports and says which
host it is on. With each peer the first transport is taken that both have and that connects (`choosing`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from pdkv.errors import StaleGenerationError, StateError, TransportError
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.connecting import Steps
from pdkv.transfer.first_error import FirstError
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.shards import HeadSlice
from pdkv.transfer.stepped import SteppedTransport
from pdkv.transfer.transport import Transfer, TransferState, Transport
from pdkv_connectors.auto.choosing import Choice, Chooser
from pdkv_connectors.auto.description import Description
from pdkv_connectors.auto.makers import MAKERS, Maker, Makers

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv.transfer.geometry import CacheGeometry

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class AutoTransport(SteppedTransport):
    """See the module's docstring.

    Args:
        makers: how each transport is made, by name; one that is left out is not used. Tried in the order of `ORDER`.
        verify: whether what arrives is compared with its owner's sums, by whichever transport; None leaves it to them:
            ipc does, the others do not. A peer that keeps no sums is refused where it is True.
        writes: whether WRITE is wanted; then only transports that can write are used, which ipc cannot.
        host: names the machine; peers with another name are not on it. By default the kernel's boot id.
    """

    name = "auto"
    can_read = True

    def __init__(
        self,
        makers: Mapping[str, Maker] | None = None,
        *,
        verify: bool | None = None,
        writes: bool = False,
        host: str | None = None,
    ) -> None:
        super().__init__()
        self.can_write = writes
        self.verifies = verify is True
        #: Whether there is one that does, for peers that it reaches; once registered, one that can be used here.
        self.converts = makers is None or "ipc" in makers
        self.counts: Counter[str] = Counter()
        options = {} if verify is None else {"verify": verify}
        chosen = MAKERS if makers is None else makers
        with_options = {name: partial(make, **options) for name, make in chosen.items()}
        self._makers = Makers(with_options, self.counts, writes=writes)
        self._host = _BOOT_ID.read_text().strip() if host is None else host
        self._registered: dict[str, Transport] = {}
        self._choices: dict[str, Choice] = {}
        self._transfers: WeakSet[Transfer] = WeakSet()
        self._closed = False

    # Registration.

    def register(
        self, cache: GrowableKVCache, engine: EngineRef, *, groups: Sequence[Sequence[str]] | None = None
    ) -> None:
        if self._closed or self._registered:
            raise StateError("the auto transport is closed or has registered a cache; unregister() it, or make one.")
        self._registered = registered = self._makers.register(cache, engine, groups)
        self.converts = any(transport.converts for transport in registered.values())
        unused = self._makers.unavailable
        logger.info("Transports of %s: %s. Not used: %s.", engine.engine_id, ", ".join(registered), unused)

    @property
    def geometry(self) -> CacheGeometry | None:
        """The registered cache's, as all transports have it; None where nothing is registered."""
        return next(
            (transport.geometry for transport in self._registered.values() if hasattr(transport, "geometry")), None
        )

    def unregister(self) -> None:
        running = sum(transfer.poll() is TransferState.RUNNING for transfer in list(self._transfers))
        if running:
            raise StateError(f"{running} transfers still run; wait until they have ended, or close() the transport.")
        self._attempts.abandon_all()
        with FirstError() as errors:
            for name, transport in list(self._registered.items()):
                if errors.attempt(f"unregister the {name} transport", transport.unregister):
                    del self._registered[name]
                    self._choices = {peer: choice for peer, choice in self._choices.items() if choice.transport != name}

    def describe(self) -> bytes:
        self._require_registered()
        return Description(self._host, {name: one.describe() for name, one in self._registered.items()}).encode()

    # Peers.

    def _meet(self, peer: EngineRef, metadata: bytes, timeout_s: float, heads: HeadSlice | None) -> Steps[None]:
        self._require_registered()
        theirs = Description.decode(metadata)
        before = self._choices.get(peer.engine_id)
        if before is not None and before.peer.generation > peer.generation:
            raise StaleGenerationError(
                f"engine {peer.engine_id!r} is connected in generation {before.peer.generation}; {peer.generation} is "
                "older, its memory is gone."
            )
        chooser = Chooser(self._host, self._registered, self._makers.unavailable, self.counts)
        choice = self._choices[peer.engine_id] = yield from chooser.connect(peer, theirs, timeout_s, heads)
        if before is not None and before.transport != choice.transport:
            leave = partial(self._registered[before.transport].disconnect, peer.engine_id)
            FirstError().attempt(f"leave {peer.engine_id} by {before.transport}", leave)
        self.counts[f"chosen_{choice.transport}"] += 1
        how = "verified" if choice.verified else "unverified"
        logger.info("Peer %s is reached by %s, %s: %s.", peer.engine_id, choice.transport, how, choice.reason)

    def disconnect(self, engine_id: str) -> None:
        self._attempts.abandon(engine_id)
        choice = self._choices.pop(engine_id, None)
        if choice is not None and choice.transport in self._registered:
            self._registered[choice.transport].disconnect(engine_id)

    # Transfers.

    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        return self._kept(self._transport_of(peer).read(peer, pairs))

    def write(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Transfer:
        if not self.can_write:
            raise TransportError("the auto transport was made to read only; make it with writes=True.")
        return self._kept(self._transport_of(peer).write(peer, pairs))

    def fences_reads(self, peer: EngineRef) -> bool:
        choice = self._choices.get(peer.engine_id)
        return choice is not None and self._registered[choice.transport].fences_reads(peer)

    def progress(self) -> None:
        for transport in self._registered.values():
            transport.progress()

    @property
    def needs_progress(self) -> bool:
        return any(transport.needs_progress for transport in self._registered.values())

    def offer(self, block_ids: Sequence[int]) -> None:
        for transport in self._registered.values():
            transport.offer(block_ids)

    def withdraw(self, block_ids: Sequence[int]) -> None:
        for transport in self._registered.values():
            transport.withdraw(block_ids)

    # State.

    def describe_state(self) -> dict[str, Any]:
        below = {name: transport.describe_state() for name, transport in self._registered.items()}
        chosen = {
            c.peer.engine_id: {"transport": c.transport, "verified": c.verified, "reason": c.reason}
            for c in self._choices.values()
        }
        return {
            "transport": self.name,
            "registered": bool(self._registered),
            "peers": sorted(self._choices),
            "running": sum(int(state.get("running", 0)) for state in below.values()),
            "chosen": chosen,
            "unavailable": dict(self._makers.unavailable),
            "below": below,
            **dict(self.counts),
        }

    def close(self, *, timeout_s: float = 5.0) -> None:
        self._closed = True
        self._attempts.abandon_all()
        try:
            self._makers.close(timeout_s)
        finally:
            self._registered, self._choices = {}, {}

    # Parts.

    def _transport_of(self, peer: EngineRef) -> Transport:
        self._require_registered()
        choice = self._choices.get(peer.engine_id)
        if choice is None:
            raise StaleGenerationError(f"engine {peer.engine_id!r} is not connected; handshake again.")
        return self._registered[choice.transport]

    def _kept(self, transfer: Transfer) -> Transfer:
        self._transfers.add(transfer)
        return transfer

    def _require_registered(self) -> None:
        if not self._registered:
            raise StateError("no cache is registered with the auto transport; register() one first.")
