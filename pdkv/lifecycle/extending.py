"""The end of a start-up: from the blocks that warmup needed to all that there is room for, and then a connector."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdkv.errors import CapacityError, ConnectorError
from pdkv.lifecycle._steps import register, timed
from pdkv.lifecycle.contracts import AgreeMinimum, ConnectorFactory, Rebind, RegistersKVCache
from pdkv.lifecycle.states import machine_of

if TYPE_CHECKING:
    from pdkv.kvcache import CommitReport, GrowableKVCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExtendReport:
    """What :func:`extend` did.

    Attributes:
        blocks: blocks committed now, the same on all ranks.
        requested_blocks: blocks that this rank had room for.
        generation: the cache's generation.
        remapped: whether the blocks of warmup were replaced by new memory.
        physical_bytes: physical memory of the cache.
        connector: the registered connector, or None where none was asked for.
        connector_created_after_extend: whether a connector was created, which is then always after the commit.
        times_s: seconds by step: agree, commit, rebind, create_connector, register.
    """

    blocks: int
    requested_blocks: int
    generation: int
    remapped: bool
    physical_bytes: int
    connector: RegistersKVCache | None
    connector_created_after_extend: bool
    times_s: Mapping[str, float]


def extend(
    cache: GrowableKVCache,
    num_blocks: int,
    connector_factory: ConnectorFactory | None = None,
    *,
    rebind: Rebind | None = None,
    agree_minimum: AgreeMinimum | None = None,
    minimum_blocks: int = 1,
) -> ExtendReport:
    """Grow the cache to what warmup left room for, and only then create and register the connector.

    In this order: agree with the other ranks; commit, in one chunk per segment where the connector registers memory;
    give the engine views of exactly the committed blocks; create the connector; register.

    A failure raises what failed and leaves nothing half done: no connector is registered, and the blocks that are
    committed can be used. It may be called again.

    Args:
        num_blocks: blocks that this rank has room for. Fewer than are committed shrink the cache.
        connector_factory: None for an engine without KV transfer.
        rebind: None where nobody holds views yet.
        agree_minimum: None where there is one rank.
        minimum_blocks: with fewer blocks the engine could not work.

    Raises:
        CapacityError: the ranks agreed on fewer than `minimum_blocks`; the cache is as it was.
        OutOfMemoryError: the blocks cannot be had; see :meth:`GrowableKVCache.commit`.
        StateError: the cache is asleep or lent.
        ConnectorError: the connector says other things about `registers_memory` than its factory.
    """
    machine_of(cache).require_running("extend")
    times_s: dict[str, float] = {}
    with timed(times_s, "agree"):
        agreed = num_blocks if agree_minimum is None else agree_minimum(num_blocks)
    _require_enough(min(agreed, cache.capacity_blocks), minimum_blocks, num_blocks)
    with timed(times_s, "commit"):
        registers = connector_factory is not None and connector_factory.registers_memory
        commit = cache.commit(agreed, defragment=registers, shrink=True)
    if rebind is not None:
        with timed(times_s, "rebind"):
            rebind(cache.committed_views(), cache.committed_config())
    connector = None
    if connector_factory is not None:
        connector = _connect(cache, connector_factory, times_s)
    report = _report(num_blocks, commit, connector, times_s)
    logger.info(
        "KV cache extended to %d blocks (%d bytes, generation %d)%s.",
        report.blocks,
        report.physical_bytes,
        report.generation,
        "" if connector is None else "; connector created and registered",
    )
    return report


def _connect(cache: GrowableKVCache, factory: ConnectorFactory, times_s: dict[str, float]) -> RegistersKVCache:
    with timed(times_s, "create_connector"):
        connector = factory(cache.committed_config())
    if connector.registers_memory and not factory.registers_memory:
        raise ConnectorError(
            f"{type(connector).__name__} registers memory, but its factory said that it does not, so that the KV cache "
            f"was not defragmented for it; set registers_memory=True on the factory."
        )
    with timed(times_s, "register"):
        register(connector, cache)
    return connector


def _require_enough(blocks: int, minimum_blocks: int, num_blocks: int) -> None:
    if blocks < max(minimum_blocks, 1):
        raise CapacityError(
            f"the KV cache would get {blocks} blocks (this rank has room for {num_blocks}), but at least "
            f"{max(minimum_blocks, 1)} are needed; give it more memory, or lower the longest request."
        )


def _report(
    num_blocks: int, commit: CommitReport, connector: RegistersKVCache | None, times_s: Mapping[str, float]
) -> ExtendReport:
    return ExtendReport(
        blocks=commit.blocks,
        requested_blocks=num_blocks,
        generation=commit.generation,
        remapped=commit.remapped,
        physical_bytes=commit.physical_bytes,
        connector=connector,
        connector_created_after_extend=connector is not None,
        times_s=times_s,
    )
