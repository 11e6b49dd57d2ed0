"""The order in which a cache and its connector act. Engine-agnostic: an engine supplies the steps that are its own.

A connector may be registered only with memory that stays where it is, and a cache may replace memory only while no
connector has it registered. So every transition of the cache's memory goes through this module:

- :func:`extend`, once, at the end of a start-up: from the blocks that warmup needed to all that there is room for;
- :func:`grow_live`, while an engine serves: more blocks, with everything that the cache holds kept.

The KV transfer connector is created by :func:`extend` and not before. Connectors copy the number of blocks in their
constructors and register memory once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdkv.errors import CapacityError, ConnectorError

if TYPE_CHECKING:
    import torch

    from pdkv.kvcache import CommitReport, GrowableKVCache, KVCacheConfig

logger = logging.getLogger(__name__)


class RegistersKVCache(Protocol):
    """What the lifecycle asks of a connector."""

    #: Whether the connector registers memory with a transport. If so, each segment must be one chunk first. A connector
    #: that copies through buffers of its own says no.
    registers_memory: bool

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        """Register ``cache.extents()``, or parts of them, and nothing else (I5, I6).

        Called once after construction, and once after each :meth:`unregister_kv_cache`.
        """

    def unregister_kv_cache(self) -> None:
        """Drop every registration. Idempotent, and allowed after a :meth:`register_kv_cache` that failed half-way.

        When it returns, no transfer touches the memory any more.
        """


class ConnectorFactory(Protocol):
    """Builds the connector for the committed blocks: a class, or a function with the attribute."""

    #: As of the connector that is built; it is needed before there is one.
    registers_memory: bool

    def __call__(self, config: KVCacheConfig) -> RegistersKVCache: ...


Rebind = Callable[[Mapping[str, "torch.Tensor"], "KVCacheConfig"], None]
"""Makes the engine use these views, ``{layer: [num_blocks, H, N, C]}``, and this number of blocks from now on."""

AgreeMinimum = Callable[[int], int]
"""Returns the minimum of its argument over all ranks. A collective: every rank calls it once, or all of them wait."""


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
        ConnectorError: the connector says other things about `registers_memory` than its factory.
    """
    times_s: dict[str, float] = {}
    with _timed(times_s, "agree"):
        agreed = num_blocks if agree_minimum is None else agree_minimum(num_blocks)
    _require_enough(min(agreed, cache.capacity_blocks), minimum_blocks, num_blocks)
    with _timed(times_s, "commit"):
        registers = connector_factory is not None and connector_factory.registers_memory
        commit = cache.commit(agreed, defragment=registers, shrink=True)
    if rebind is not None:
        with _timed(times_s, "rebind"):
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


class ServesPeers(RegistersKVCache, Protocol):
    """What :func:`grow_live` asks of a connector, which has peers by then."""

    def pause_transfers(self, timeout_s: float) -> None:
        """Let no transfer begin, and wait until none runs, in or out; peers have dropped what they know of this memory.

        Raises:
            TimeoutError: a transfer still runs. Transfers go on as before.
        """

    def publish(self, generation: int) -> None:
        """Tell peers the present registration and its generation, by which they know that they must connect again."""

    def resume_transfers(self) -> None:
        """Let transfers begin again."""


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
    """
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
    with _timed(times_s, "pause"):
        connector.pause_transfers(pause_timeout_s)
    with _timed(times_s, "unregister"):
        connector.unregister_kv_cache()
    try:
        with _timed(times_s, "commit"):
            commit = cache.commit(num_blocks, defragment=True, preserve=True)
        if rebind is not None:
            with _timed(times_s, "rebind"):
                rebind(cache.committed_views(), cache.committed_config())
    finally:
        _serve_again(cache, connector, times_s)
    logger.info("Live KV cache grown to %d blocks, generation %d.", commit.blocks, commit.generation)
    return GrowReport(commit.blocks, commit.added_blocks, commit.generation, commit.remapped, times_s)


def _serve_again(cache: GrowableKVCache, connector: ServesPeers, times_s: dict[str, float]) -> None:
    """Whatever the cache is like now: register it, and only then let peers come back."""
    with _timed(times_s, "register"):
        _register(connector, cache)
    with _timed(times_s, "publish"):
        connector.publish(cache.generation)
    connector.resume_transfers()


def _connect(cache: GrowableKVCache, factory: ConnectorFactory, times_s: dict[str, float]) -> RegistersKVCache:
    with _timed(times_s, "create_connector"):
        connector = factory(cache.committed_config())
    if connector.registers_memory and not factory.registers_memory:
        raise ConnectorError(
            f"{type(connector).__name__} registers memory, but its factory said that it does not, so that the KV cache "
            f"was not defragmented for it; set registers_memory=True on the factory."
        )
    with _timed(times_s, "register"):
        _register(connector, cache)
    return connector


def _register(connector: RegistersKVCache, cache: GrowableKVCache) -> None:
    """Register all, or nothing."""
    try:
        connector.register_kv_cache(cache)
    except BaseException as error:
        try:
            connector.unregister_kv_cache()
        except Exception as second:
            error.add_note(f"Dropping what had been registered failed too: {second!r}")
            logger.exception("Dropping a connector's half-made registration failed.")
        raise


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


@contextmanager
def _timed(times_s: dict[str, float], step: str) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        times_s[step] = time.perf_counter() - begin
