"""What every transport checks before it posts anything; one copy for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdkv.errors import ProtocolError, StaleGenerationError
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.messages import EngineRef

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connection(Generic[T]):
    """A peer in one generation: its geometry, and what the transport keeps of it."""

    peer: EngineRef
    geometry: CacheGeometry
    link: T


class Connections(Generic[T]):
    """The peers of a transport, one generation of each."""

    def __init__(self) -> None:
        self._by_engine: dict[str, Connection[T]] = {}

    def require_not_older(self, peer: EngineRef) -> None:
        """Refuse to go back to memory that has been replaced.

        Raises:
            StaleGenerationError: a newer generation of the peer is connected.
        """
        known = self._by_engine.get(peer.engine_id)
        if known is not None and known.peer.generation > peer.generation:
            raise StaleGenerationError(
                f"engine {peer.engine_id!r} is connected in generation {known.peer.generation}; generation "
                f"{peer.generation} is older, its memory is gone."
            )

    def add(self, connection: Connection[T]) -> None:
        """In the place of the engine's other generations."""
        self._by_engine[connection.peer.engine_id] = connection

    def get(self, peer: EngineRef) -> Connection[T]:
        """The peer in exactly this generation (I10).

        Raises:
            StaleGenerationError: it is connected in another one, or not at all.
        """
        known = self._by_engine.get(peer.engine_id)
        if known is None or known.peer != peer:
            found = "not connected" if known is None else f"connected in generation {known.peer.generation}"
            raise StaleGenerationError(
                f"engine {peer.engine_id!r} was named in generation {peer.generation}, but it is {found}; handshake "
                "again."
            )
        return known

    def find(self, engine_id: str) -> Connection[T] | None:
        """The engine in whichever generation."""
        return self._by_engine.get(engine_id)

    def drop(self, engine_id: str) -> Connection[T] | None:
        """Forget an engine; what was known of it, for the transport to let go of."""
        return self._by_engine.pop(engine_id, None)

    def all(self) -> tuple[Connection[T], ...]:
        """Every peer."""
        return tuple(self._by_engine.values())

    def __len__(self) -> int:
        return len(self._by_engine)


def require_pairs(pairs: Sequence[BlockPair], source: CacheGeometry, destination: CacheGeometry) -> None:
    """Refuse pairs that name what is not there, or one destination twice.

    Raises:
        ProtocolError: there is no pair; a group is unknown; a block is not committed on its side; a destination block
            occurs twice, in whichever groups: groups may share their memory.
    """
    if not pairs:
        raise ProtocolError("a transfer of no block was asked for; name at least one.")
    num_groups = len(source.groups)
    for group, source_id, destination_id in pairs:
        if not 0 <= group < num_groups:
            raise ProtocolError(f"KV-cache group {group} was named, but there are {num_groups}; nothing is posted.")
        if not 0 <= source_id < source.num_blocks:
            raise _not_committed("source", source_id, source.num_blocks)
        if not 0 <= destination_id < destination.num_blocks:
            raise _not_committed("destination", destination_id, destination.num_blocks)
    twice = len(pairs) - len({pair[2] for pair in pairs})
    if twice:
        raise ProtocolError(f"{twice} destination block(s) occur twice in one transfer; nothing is posted.")


def _not_committed(side: str, block_id: int, num_blocks: int) -> ProtocolError:
    return ProtocolError(
        f"block {block_id} was named as a {side}, but only blocks 0..{num_blocks - 1} are committed there; nothing is "
        "posted."
    )
