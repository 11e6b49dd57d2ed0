"""Which block of the source goes to which block of the destination: paired by index in the prompt, or refused.

Pairing lists of block ids from one end is right only while both lists end (or begin) at the same token. A prefix cached
on decode, a block more on prefill, or a sliding window breaks that in silence. So each list says which index its first
block has, and an index that only one side has is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, NamedTuple

import msgspec

from pdkv.errors import ProtocolError

MAX_BLOCKS = 65_536  # of one run; a million tokens at 16 a block
MAX_GROUPS = 64  # KV-cache groups; hybrid models have a handful

BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class BlockRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive blocks of one KV-cache group of a request.

    Attributes:
        first: index in the prompt of the first block: tokens ``first * block_size`` and on.
        block_ids: the engine's block ids, one for each index from `first`.
    """

    first: Index
    block_ids: Annotated[tuple[BlockId, ...], msgspec.Meta(max_length=MAX_BLOCKS)]

    @property
    def end(self) -> int:
        """The index after the last."""
        return self.first + len(self.block_ids)


class BlockPair(NamedTuple):
    """One block of a transfer: KV-cache group, source block id, destination block id.

    Between caches with blocks of different sizes it is a *unit*, as many tokens as the smaller block has, on both
    sides: unit ``block * n + i`` is the i-th of the n units of a block.
    """

    group: int
    source: int
    destination: int


def pair_by_index(source: Sequence[BlockRun], destination: Sequence[BlockRun]) -> tuple[BlockPair, ...]:
    """Every destination block with the source block of the same group and index.

    The source may have more indices than the destination (a prefix cached there, a last block that it does not want);
    the destination may not have one that the source lacks.

    Raises:
        ProtocolError: the groups differ in number, or a destination index has no source block.
    """
    if len(source) != len(destination):
        raise ProtocolError(
            f"the source has {len(source)} KV-cache groups and the destination {len(destination)}; both sides must "
            "run the same model with the same grouping."
        )
    return tuple(pair for group in range(len(source)) for pair in _pair_group(group, source[group], destination[group]))


def _pair_group(group: int, source: BlockRun, destination: BlockRun) -> Iterator[BlockPair]:
    if not destination.block_ids:
        return
    if destination.first < source.first or destination.end > source.end:
        raise ProtocolError(
            f"block indices {destination.first}..{destination.end - 1} of group {group} are wanted, but the source has "
            f"{source.first}..{source.end - 1}; prompts or block sizes differ, so nothing is transferred."
        )
    for offset, block_id in enumerate(destination.block_ids):
        yield BlockPair(group, source.block_ids[destination.first - source.first + offset], block_id)


def units_of(
    source: Sequence[BlockRun], destination: Sequence[BlockRun], sizes: tuple[int, int], num_tokens: int
) -> tuple[Sequence[BlockRun], Sequence[BlockRun]]:
    """Runs of blocks as runs of units; see :class:`BlockPair`. Units behind the prompt are left out.

    Args:
        sizes: tokens in a block of the source and of the destination; where they are the same, blocks are the units.
        num_tokens: of the prompt.

    Raises:
        ProtocolError: no block size divides the other, or a destination block lies behind the prompt.
    """
    if sizes[0] == sizes[1]:
        return source, destination
    unit = min(sizes)
    if unit < 1 or max(sizes) % unit:
        raise ProtocolError(f"blocks of {sizes[0]} and {sizes[1]} tokens: one size must divide the other.")
    if any(run.block_ids and (run.end - 1) * sizes[1] >= num_tokens for run in destination):
        raise ProtocolError(f"a block behind the {num_tokens} tokens of the prompt is wanted; nothing is transferred.")
    each_source, each_destination = (size // unit for size in sizes)
    wanted = -(-num_tokens // unit)
    return (
        [_in_units(run, each_source, wanted) for run in source],
        [_in_units(run, each_destination, wanted) for run in destination],
    )


def _in_units(run: BlockRun, units: int, end: int) -> BlockRun:
    """With `units` to a block, as far as index `end`; no more are made, however many a peer says that a block has."""
    first = run.first * units
    ids = (block_id * units + unit for block_id in run.block_ids for unit in range(units))
    return BlockRun(first, tuple(islice(ids, max(0, end - first))))


def block_ids(runs: Sequence[BlockRun]) -> tuple[int, ...]:
    """All block ids of the runs, in order."""
    return tuple(block_id for run in runs for block_id in run.block_ids)


def require_committed(runs: Sequence[BlockRun], num_blocks: int, *, first_block: int = 1) -> None:
    """Refuse block ids that a cache of `num_blocks` committed blocks cannot hold.

    Args:
        first_block: the lowest id that may hold a request's KV. Block 0 is vLLM's null block.

    Raises:
        ProtocolError: an id is outside ``first_block..num_blocks - 1``, or occurs twice.
    """
    ids = block_ids(runs)
    for block_id in ids:
        if not first_block <= block_id < num_blocks:
            raise ProtocolError(
                f"block id {block_id} was named, but only ids {first_block}..{num_blocks - 1} are committed; "
                "the transfer is refused."
            )
    if len(set(ids)) != len(ids):
        raise ProtocolError(f"{len(ids) - len(set(ids))} block id(s) occur twice in one transfer; it is refused.")
