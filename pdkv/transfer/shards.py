"""Which ranks of a peer hold the KV heads that a rank here needs.

Tensor parallelism deals the H KV heads of a model out to n ranks in order. With H a multiple of n, rank r has heads
``r * H / n`` and on; with n a multiple of H, n / H ranks that follow each other have the same head each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pdkv.kvcache.specs import Interior
from pdkv.transfer.geometry import Number

if TYPE_CHECKING:
    from pdkv.kvcache import KVCacheConfig


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Which heads of each side's pages are copied: `count` from the given first ones."""

    count: int
    source: int = 0
    destination: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank of the source gives one rank of the destination.

    Attributes:
        rank: of the source.
        heads: None where it is all heads of both.
    """

    rank: int
    heads: HeadSlice | None


class Shards(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the KV heads of a model, the same in all layers, lie on the ranks of an engine.

    Attributes:
        num_layers: of the model.
        num_kv_heads: of the model, over all ranks, each counted once. 1 where heads share one latent vector (MLA).
        head_nbytes: bytes that one state (token) of one head takes in one layer, K and V.
        num_ranks: tensor-parallel ranks.
        interior: how a head's bytes lie in a page; never "opaque".
    """

    num_layers: Number
    num_kv_heads: Number
    head_nbytes: Number
    num_ranks: Number
    interior: Interior = "tokens"

    @classmethod
    def of(cls, config: KVCacheConfig, num_kv_heads: int, num_ranks: int) -> Shards | None:
        """Of an engine, by the cache of any rank.

        None where layers differ, what is in a page is not known, or heads are not dealt out as said above: then the
        engine exchanges KV only with one that is exactly like it.
        """
        pages = {(spec.num_heads, spec.content_bytes, spec.interior) for spec in config.specs.values()}
        heads_here, head_nbytes, interior = next(iter(pages))
        found = cls(len(config.specs), num_kv_heads, head_nbytes, num_ranks, interior)
        is_even = len(pages) == 1 and found.are_even and found.heads_of_rank == heads_here
        return found if is_even and interior != "opaque" else None

    @property
    def are_even(self) -> bool:
        """Whether all ranks have as many heads."""
        return 0 in (self.num_kv_heads % self.num_ranks, self.num_ranks % self.num_kv_heads)

    @property
    def heads_of_rank(self) -> int:
        """Heads on each rank."""
        return max(1, self.num_kv_heads // self.num_ranks)

    @property
    def replicas(self) -> int:
        """Ranks that have the same head."""
        return max(1, self.num_ranks // self.num_kv_heads)

    def first_head(self, rank: int) -> int:
        """The model's number of the first head on a rank."""
        return rank // self.replicas * self.heads_of_rank


def parts_of(rank: int, destination: Shards, source: Shards) -> tuple[Part, ...]:
    """What rank `rank` of the destination reads: every head that it has, each from one rank of the source.

    Of source ranks that have the same head, those of the destination take turns. Both are of the same model and even.
    """
    begin, parts = destination.first_head(rank), []
    head, end = begin, begin + destination.heads_of_rank
    while head < end:
        there = head // source.heads_of_rank * source.replicas + rank % source.replicas
        first = source.first_head(there)
        count = min(first + source.heads_of_rank, end) - head
        whole = count == source.heads_of_rank == destination.heads_of_rank
        parts.append(Part(there, None if whole else HeadSlice(count, head - first, head - begin)))
        head += count
    return tuple(parts)
