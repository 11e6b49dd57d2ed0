"""More blocks for a cache that holds live KV, under an engine between two of its steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdkv.errors import CapacityError, ConnectorError
from pdkv.lifecycle._steps import serve_again, timed
from pdkv.lifecycle.contracts import Rebind, ServesPeers
from pdkv.lifecycle.states import machine_of

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GrowReport:
    """What :func:`grow_live` did.

    Attributes:
        blocks: blocks committed now.
        added_blocks: how many of them are new, and zero.
        generation: the cache's generation, which has risen where earlier blocks were moved to new memory.
        moved: whether earlier blocks were moved.
        times_s: seconds by step: pause, unregister, commit, rebind, register, publish.
    """

    blocks: int
    added_blocks: int
    generation: int
    moved: bool
    times_s: Mapping[str, float]


def grow_live(
    cache: GrowableKVCache,
    num_blocks: int,
    connector: ServesPeers,
    *,
    rebind: Rebind | None = None,
    pause_timeout_s: float = 30.0,
) -> GrowReport:
    """Grow a cache that holds live KV, under an engine that is not running a step.

    In this order: pause transfers; unregister; commit, in one chunk per segment, contents carried over; give the engine
    views of exactly the committed blocks; register; publish; resume. Views over the capacity and captured graphs stay
    valid, the contents stay, and the generation rises where memory was moved, so that peers register anew.

    Spare memory is needed for the largest segment beside all others. Where it is missing, or anything else in the way
    of the commit, the blocks that there were are registered and published again, transfers go on, and the error is
    raised.

    Args:
        num_blocks: no fewer than are committed; more than the capacity counts as the capacity.
        rebind: None where the engine works on views over the capacity.
        pause_timeout_s: seconds that running transfers have to end.

    Raises:
        CapacityError: fewer blocks than are committed. Nothing was changed.
        TimeoutError: transfers did not end in time. Nothing was changed.
        OutOfMemoryError: there is no memory. Nothing was lost.
        ConnectorError: the connector registers no memory, so that it has no need of this.
        StateError: the cache is asleep or lent.
    """
    machine_of(cache).require_running("grow_live")
    if not connector.registers_memory:
        raise ConnectorError(
            f"{type(connector).__name__} registers no memory, so nothing needs to be moved; commit() grows the cache."
        )
    if num_blocks < cache.num_committed_blocks:
        raise CapacityError(
            f"a live cache of {cache.num_committed_blocks} blocks cannot shrink to {num_blocks}: some of them may be "
            "in use; give at least as many."
        )
    times_s: dict[str, float] = {}
    with timed(times_s, "pause"):
        connector.pause_transfers(pause_timeout_s)
    with timed(times_s, "unregister"):
        connector.unregister_kv_cache()
    try:
        with timed(times_s, "commit"):
            commit = cache.commit(num_blocks, defragment=True, preserve=True)
        if rebind is not None:
            with timed(times_s, "rebind"):
                rebind(cache.committed_views(), cache.committed_config())
    finally:
        serve_again(cache, connector, times_s)
    logger.info("Live KV cache grown to %d blocks, generation %d.", commit.blocks, commit.generation)
    return GrowReport(commit.blocks, commit.added_blocks, commit.generation, commit.remapped, times_s)
