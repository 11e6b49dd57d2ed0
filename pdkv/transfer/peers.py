"""Whom an engine knows, and which of a peer's transfers are over for good."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pdkv.transfer.actions import AddPeer
from pdkv.transfer.messages import Compatibility, Descriptor, EngineRef

MAX_PEERS = 4096


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine whose descriptor has been taken.

    Attributes:
        fences_reads: whether the transport to it does (:meth:`pdkv.transfer.transport.Transport.fences_reads`).
        is_unreached: the transport was told of it and could not reach it.
    """

    ref: EngineRef
    descriptor: Descriptor
    fences_reads: bool = False
    is_unreached: bool = False


class Peers:
    """The newest generation of each engine that was met; the ones met longest ago are forgotten first."""

    def __init__(self, max_peers: int = MAX_PEERS) -> None:
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._max_peers = max_peers

    def get(self, ref: EngineRef) -> Peer | None:
        """The peer in exactly this generation."""
        peer = self._peers.get(ref.engine_id)
        return peer if peer is not None and peer.ref == ref else None

    def newest(self, engine_id: str) -> Peer | None:
        """The peer in whichever generation."""
        return self._peers.get(engine_id)

    def all(self) -> tuple[Peer, ...]:
        """Everybody that is known."""
        return tuple(self._peers.values())

    def learn(self, ref: EngineRef, descriptor: Descriptor) -> AddPeer | None:
        """Remember a descriptor; what the host has to do where it is new. One of an older generation is ignored."""
        known = self._peers.get(ref.engine_id)
        if known is not None and known.ref.generation >= ref.generation:
            return None
        self._peers[ref.engine_id] = Peer(ref, descriptor)
        self._peers.move_to_end(ref.engine_id)
        while len(self._peers) > self._max_peers:
            self._peers.popitem(last=False)
        return AddPeer(ref, descriptor, None if known is None else known.ref)

    def note_fence(self, ref: EngineRef) -> None:
        """The transport to the peer, in just this generation, fences READs."""
        if (peer := self.get(ref)) is not None:
            self._peers[ref.engine_id] = replace(peer, fences_reads=True)

    def note_unreached(self, ref: EngineRef) -> None:
        """The transport could not reach the peer, in just this generation."""
        if (peer := self.get(ref)) is not None:
            self._peers[ref.engine_id] = replace(peer, is_unreached=True)

    def add_again(self, ref: EngineRef) -> AddPeer | None:
        """What the host has to do before it moves anything; None where the transport is not known to lack the peer."""
        peer = self.get(ref)
        if peer is None or not peer.is_unreached:
            return None
        self._peers[ref.engine_id] = replace(peer, is_unreached=False)
        return AddPeer(ref, peer.descriptor, ref)

    def forget(self, engine_id: str) -> None:
        """Handshake again before the next transfer with it."""
        self._peers.pop(engine_id, None)

    def clear(self) -> None:
        """The own agent is a new one: it knows nobody."""
        self._peers.clear()


@dataclass(slots=True)
class _Used:
    floor: int = 0
    over: set[int] = field(default_factory=set)


class UsedTransfers:
    """Transfer ids of each D engine that are over on P. A registration that arrives late or twice finds its id here.

    D frees the destination blocks of a transfer only after P has acknowledged its end, and says with every message
    which of its ids are still alive. So what P remembers is exact and stays small, whatever the network delays.
    """

    def __init__(self, max_engines: int = MAX_PEERS, max_ids: int = 65_536) -> None:
        self._used: OrderedDict[str, _Used] = OrderedDict()
        self._max_engines = max_engines
        self._max_ids = max_ids

    def raise_floor(self, engine_id: str, floor: int) -> None:
        """All ids below `floor` are over."""
        used = self._of(engine_id)
        if floor > used.floor:
            used.floor = floor
            used.over = {transfer_id for transfer_id in used.over if transfer_id >= floor}

    def mark(self, engine_id: str, transfer_id: int) -> None:
        """This one is over. A peer that never raises its floor loses its lowest ids, over or not."""
        used = self._of(engine_id)
        if transfer_id >= used.floor:
            used.over.add(transfer_id)
        if len(used.over) > self._max_ids:
            self.raise_floor(engine_id, sorted(used.over)[len(used.over) // 2])

    def is_over(self, engine_id: str, transfer_id: int) -> bool:
        """Whether it must never be started."""
        used = self._of(engine_id)
        return transfer_id < used.floor or transfer_id in used.over

    def _of(self, engine_id: str) -> _Used:
        used = self._used.setdefault(engine_id, _Used())
        while len(self._used) > self._max_engines:
            self._used.popitem(last=False)
        return used


def why_incompatible(ours: Compatibility, theirs: Compatibility) -> str | None:
    """One sentence that names the first difference that keeps the two from exchanging KV, or None."""
    if (reason := _first_unequal(ours, theirs, ("model", "dtype", "cache_dtype", "connector"))) is not None:
        return reason
    our, their = ours.shards, theirs.shards
    if our is None or their is None:
        return _first_unequal(ours, theirs, ("layout", "block_size"))
    if (reason := _first_unequal(our, their, ("num_layers", "num_kv_heads", "head_nbytes", "interior"))) is not None:
        return reason
    if not their.are_even:
        return f"{their.num_kv_heads} KV heads cannot be dealt out to the peer's {their.num_ranks} ranks evenly."
    if (ours.layout, ours.block_size, our.heads_of_rank) == (theirs.layout, theirs.block_size, their.heads_of_rank):
        return None
    both = f"the peer's KV cache is {_in_words(theirs)}, and this engine's is {_in_words(ours)}"
    if not (ours.converts and theirs.converts):
        return (
            f"{both}; the transport copies bytes as they are: give both engines the same block size, layout and tensor "
            "parallelism, or run them on one machine over ipc, which converts."
        )
    if our.interior == "heads" and ours.block_size != theirs.block_size:
        return f"{both}; how their kernels arrange a block is not known: give both engines the same block size."
    small, large = sorted((ours.block_size, theirs.block_size))
    if not small or large % small:
        return f"{both}; one block size must divide the other: change one of them."
    return None


def _first_unequal(ours: msgspec.Struct, theirs: msgspec.Struct, names: Sequence[str]) -> str | None:
    for name in names:
        wanted, found = getattr(ours, name), getattr(theirs, name)
        if wanted != found:
            return f"{name} is {found!r} on the peer and {wanted!r} here; both must be the same to exchange KV."
    return None


def _in_words(side: Compatibility) -> str:
    ranks = 1 if side.shards is None else side.shards.num_ranks
    return f"{side.layout[:120]} with blocks of {side.block_size} tokens on {ranks} rank{'s' * (ranks > 1)}"
