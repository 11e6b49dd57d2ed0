"""What changes of a cache report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit did.

    Attributes:
        blocks: blocks committed now.
        added_blocks: how many of them were not committed before; negative after a shrink.
        remapped: whether the physical memory of earlier blocks was replaced: registrations are stale.
        contents_kept: whether the blocks that were and are committed still hold what they held.
        generation: the cache's generation now.
        physical_bytes: physical memory of the cache now.
    """

    blocks: int
    added_blocks: int
    remapped: bool
    contents_kept: bool
    generation: int
    physical_bytes: int
