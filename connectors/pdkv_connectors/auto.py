"""Chooses a transport for each peer: ipc on the same host, else nixl, else ucx.

What can be used here is registered; UCX listens only where NIXL cannot be had. A peer's description holds those of all
its transports and says which host it is on. With each peer the first transport is taken that both have and that
connects. A transport that should have worked and did not is counted as a fall back, and logged with its reason (I13).

Where nobody says whether to verify, it is a preference like the order: for a peer that keeps no sums the next transport
is taken, unverified; that is counted by itself and logged. With ``verify=True`` such a peer is refused.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakSet

import msgspec

from pdkv.errors import (
    ConnectorError,
    DriverError,
    GeometryError,
    PdkvError,
    ProtocolError,
    StaleGenerationError,
    StateError,
    TransportError,
)
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.first_error import FirstError
from pdkv.transfer.messages import MAX_METADATA_NBYTES, EngineRef
from pdkv.transfer.shards import HeadSlice
from pdkv.transfer.transport import Transfer, TransferState, Transport
from pdkv.transfer.unpacking import unpack

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv.transfer.geometry import CacheGeometry

logger = logging.getLogger(__name__)

ORDER = ("ipc", "nixl", "ucx")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Maker = Callable[..., Transport]


class _Own(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The description: the host, and what each transport says, by name."""

    host: Annotated[str, msgspec.Meta(max_length=256)]
    transports: Annotated[dict[str, bytes], msgspec.Meta(max_length=16)]


_decoder = msgspec.msgpack.Decoder(_Own)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a peer is reached by, whether that verifies, and why it is not something better."""

    peer: EngineRef
    transport: str
    verified: bool
    reason: str


def _ipc(**options: Any) -> Transport:
    from pdkv_connectors.ipc.transport import IpcTransport

    return IpcTransport(**options)


def _nixl(**options: Any) -> Transport:
    from pdkv_connectors.nixl.transport import NixlTransport

    return NixlTransport(**options)


def _ucx(**options: Any) -> Transport:
    from pdkv_connectors.ucx.transport import UcxTransport

    return UcxTransport(**options)


MAKERS: Mapping[str, Maker] = {"ipc": _ipc, "nixl": _nixl, "ucx": _ucx}


class AutoTransport(Transport):
    """See the module's docstring.

    Args:
        makers: how each transport is made, by name; one that is left out is not used. Tried in the order of `ORDER`.
        verify: whether what arrives is compared with its owner's sums, by whichever transport; None leaves it to them:
            ipc does, the others do not.
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
        self.can_write = writes
        self.verifies = verify is True
        #: Whether there is one that does, for peers that it reaches; once registered, one that can be used here.
        self.converts = makers is None or "ipc" in makers
        self.counts: Counter[str] = Counter()
        #: Why a transport is not used here, by its name.
        self.unavailable: dict[str, str] = {}
        options = {} if verify is None else {"verify": verify}
        chosen = MAKERS if makers is None else makers
        self._makers = {name: partial(make, **options) for name, make in chosen.items()}
        self._host = _BOOT_ID.read_text().strip() if host is None else host
        self._made: dict[str, Transport] = {}
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
        registered: dict[str, Transport] = {}
        self.unavailable = {}
        try:
            for name in ORDER:
                if (transport := self._usable(name, registered)) is None:
                    continue
                try:
                    transport.register(cache, engine, groups=groups)
                except (ConnectorError, DriverError) as error:
                    self._is_unavailable(name, str(error))
                else:
                    registered[name] = transport
        except BaseException:
            for name, transport in registered.items():
                FirstError().attempt(f"unregister the {name} transport again", transport.unregister)
            raise
        if not registered:
            raise TransportError(f"no transport can be used here: {_listed(self.unavailable)}.")
        self._registered = registered
        self.converts = any(transport.converts for transport in registered.values())
        logger.info("Transports of %s: %s. Not used: %s.", engine.engine_id, ", ".join(registered), self.unavailable)

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
        with FirstError() as errors:
            for name, transport in list(self._registered.items()):
                if errors.attempt(f"unregister the {name} transport", transport.unregister):
                    del self._registered[name]
                    self._choices = {peer: choice for peer, choice in self._choices.items() if choice.transport != name}

    def describe(self) -> bytes:
        self._require_registered()
        own = _Own(self._host, {name: transport.describe() for name, transport in self._registered.items()})
        frame = msgspec.msgpack.encode(own)
        if len(frame) > MAX_METADATA_NBYTES:
            raise TransportError(f"{len(own.transports)} transports take {len(frame)} bytes to describe; use fewer.")
        return frame

    # Peers.

    def connect(
        self, peer: EngineRef, metadata: bytes, *, timeout_s: float = 5.0, heads: HeadSlice | None = None
    ) -> None:
        self._require_registered()
        theirs = _decode(metadata)
        before = self._choices.get(peer.engine_id)
        if before is not None and before.peer.generation > peer.generation:
            raise StaleGenerationError(
                f"engine {peer.engine_id!r} is connected in generation {before.peer.generation}; {peer.generation} is "
                "older, its memory is gone."
            )
        choice = self._choices[peer.engine_id] = self._connect(peer, theirs, timeout_s, heads)
        if before is not None and before.transport != choice.transport:
            leave = partial(self._registered[before.transport].disconnect, peer.engine_id)
            FirstError().attempt(f"leave {peer.engine_id} by {before.transport}", leave)
        self.counts[f"chosen_{choice.transport}"] += 1
        how = "verified" if choice.verified else "unverified"
        logger.info("Peer %s is reached by %s, %s: %s.", peer.engine_id, choice.transport, how, choice.reason)

    def disconnect(self, engine_id: str) -> None:
        choice = self._choices.pop(engine_id, None)
        if choice is not None and choice.transport in self._registered:
            self._registered[choice.transport].disconnect(engine_id)

    def _connect(self, peer: EngineRef, theirs: _Own, timeout_s: float, heads: HeadSlice | None) -> Choice:
        """Try what both have, the best first."""
        deadline, failed = time.monotonic() + timeout_s, dict[str, PdkvError]()
        why = {name: self._why_not(name, theirs) for name in ORDER}
        for name in ORDER:
            if why[name]:
                continue
            left_s = max(0.05, deadline - time.monotonic())
            try:
                self._registered[name].connect(peer, theirs.transports[name], timeout_s=left_s, heads=heads)
            except TransportError as error:
                failed[name], why[name] = error, str(error)
                self.counts["fallbacks"] += 1
                logger.warning("Peer %s cannot be reached by %s: %s", peer.engine_id, name, error)
            else:
                better = {other: why[other] for other in ORDER[: ORDER.index(name)]}
                verified = self._registered[name].verifies
                if not verified and any(self._registered[other].verifies for other in failed):
                    self.counts["unverified_fallbacks"] += 1
                    logger.warning("What peer %s sends is not verified; set `verify` alike on both.", peer.engine_id)
                return Choice(peer, name, verified, _listed(better) or "the peer is on this host")
        misfits = [name for name, error in failed.items() if isinstance(error, GeometryError)]
        if misfits and len(failed) > len(misfits):
            others = {name: reason for name, reason in why.items() if name not in misfits}
            raise GeometryError(f"{failed[misfits[0]]} What else there is: {_listed(others)}.")
        if failed:
            raise next(iter(failed.values()))
        raise TransportError(f"engine {peer.engine_id!r} has no transport in common with this one: {_listed(why)}.")

    def _why_not(self, name: str, theirs: _Own) -> str:
        if name not in self._registered:
            return self.unavailable.get(name, "it is not wanted here")
        if name not in theirs.transports:
            return "the peer does not have it"
        return "the peer is on another host" if name == "ipc" and theirs.host != self._host else ""

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
            "unavailable": dict(self.unavailable),
            "below": below,
            **dict(self.counts),
        }

    def close(self, *, timeout_s: float = 5.0) -> None:
        self._closed = True
        with FirstError() as errors:
            for name, transport in list(self._made.items()):
                if errors.attempt(f"close the {name} transport", partial(transport.close, timeout_s=timeout_s)):
                    del self._made[name]
            self._registered, self._choices = {}, {}

    # Parts.

    def _usable(self, name: str, registered: Mapping[str, Transport]) -> Transport | None:
        """The transport, made once; None, with the reason noted, where it is not to be used."""
        if name not in self._makers:
            return None
        if name == "ucx" and "nixl" in registered:
            self._is_unavailable(name, "nixl is used in its place", wanted=False)
            return None
        try:
            transport = self._made.get(name) or self._makers[name]()
        except (ConnectorError, DriverError, ImportError, OSError) as error:
            self._is_unavailable(name, str(error))
            return None
        self._made[name] = transport
        if self.can_write and not transport.can_write:
            self._is_unavailable(name, "it cannot write", wanted=False)
            return None
        return transport

    def _is_unavailable(self, name: str, reason: str, *, wanted: bool = True) -> None:
        self.unavailable[name] = reason
        if wanted:
            self.counts[f"unavailable_{name}"] += 1
            logger.warning("The %s transport cannot be used here: %s", name, reason)

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


def _decode(metadata: bytes) -> _Own:
    if len(metadata) > MAX_METADATA_NBYTES:
        raise ProtocolError(f"a peer's metadata has {len(metadata)} bytes, more than {MAX_METADATA_NBYTES}.")
    return unpack(_decoder, metadata, "a peer's metadata for the auto transport")


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason.rstrip('.')}" for name, reason in reasons.items() if reason)
