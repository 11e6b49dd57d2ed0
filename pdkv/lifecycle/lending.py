"""Lend the cache's memory to a weight update, and take it back afterwards.

Loading a layer needs room for the new weights beside the old ones. On a card that the KV cache fills there is none.
Where the cache holds nothing to keep, its memory is that room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from pdkv.errors import OutOfMemoryError
from pdkv.kvcache.sizing_constants import SizingConstants
from pdkv.lifecycle.contracts import SleepsWithPeers
from pdkv.lifecycle.sleeping import let_go, take_back
from pdkv.lifecycle.states import State, machine_of

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

logger = logging.getLogger(__name__)

#: Times the largest layer that loading may need; its source is with the other constants of sizing.
WEIGHT_UPDATE_FACTOR = SizingConstants().weight_update_factor


@dataclass(frozen=True, slots=True)
class LendReport:
    """What a weight update was given, in bytes.

    Attributes:
        wanted: a factor times the largest layer.
        free: what was free before, as the driver counts it.
        lent: whether the cache's memory was released for it.
        given_back: how much of the cache's memory became free, as the driver counts it.
    """

    wanted: int
    free: int
    lent: bool
    given_back: int


def largest_layer_nbytes(model: Any) -> int:
    """Bytes of the parameters and buffers of the layer that has most, those of its own children not included.

    Args:
        model: a `torch.nn.Module`; its submodules are the layers, as a weight update loads them one after the other.
    """
    return max((_own_nbytes(module) for module in model.modules()), default=0)


def _own_nbytes(module: Any) -> int:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return sum(int(tensor.numel()) * int(tensor.element_size()) for tensor in own)


@contextmanager
def kv_cache_lent_for_weight_update(
    cache: GrowableKVCache,
    model: Any,
    *,
    reclaimable: bool | Callable[[], bool],
    fail_if_short: bool = True,
    connector: SleepsWithPeers | None = None,
    factor: float = WEIGHT_UPDATE_FACTOR,
) -> Iterator[LendReport]:
    """Have room for `factor` times the model's largest layer while weights are loaded inside the context.

    Where that much is free, nothing happens to the cache. Where not, and the cache holds nothing to keep, its memory is
    released for the context; afterwards, also where loading raised, it is committed again, zeroed, registered and
    published with a new generation. The cap on torch's memory is lifted inside the context in any case.

    Args:
        model: a `torch.nn.Module`.
        reclaimable: whether the cache holds nothing to keep: no request runs, and prefix-cache entries are gone.
        fail_if_short: raise where not even the largest layer fits; else only warn.
        connector: None for an engine without KV transfer.

    Raises:
        OutOfMemoryError: not even the largest layer fits, before any weight was changed; or, after the context, there
            is no memory for the cache any more: it is then asleep, and can be woken later.
        StateError: the cache is draining, asleep or lent.
    """
    machine = machine_of(cache)
    machine.require_running("lend")
    layer = largest_layer_nbytes(model)
    machine.move(State.LENT)
    with _uncapped(cache):
        try:
            report = _make_room(cache, connector, layer, ceil(factor * layer), reclaimable, fail_if_short)
        except BaseException:
            machine.move(State.ASLEEP if cache.is_released else State.RUNNING)
            raise
        try:
            yield report
        finally:
            _end(cache, connector, report)


def _end(cache: GrowableKVCache, connector: SleepsWithPeers | None, report: LendReport) -> None:
    machine = machine_of(cache)
    try:
        if report.lent:
            take_back(cache, connector)
    except BaseException:
        machine.move(State.ASLEEP)
        raise
    machine.move(State.RUNNING)


def _make_room(
    cache: GrowableKVCache,
    connector: SleepsWithPeers | None,
    layer: int,
    wanted: int,
    reclaimable: bool | Callable[[], bool],
    fail_if_short: bool,
) -> LendReport:
    free = _free(cache)
    if free >= wanted:
        return LendReport(wanted, free, False, 0)
    can_reclaim = (reclaimable() if callable(reclaimable) else reclaimable) and _nobody_holds(connector)
    reachable = free + (cache.physical_bytes if can_reclaim else 0)
    if reachable < layer and fail_if_short:
        why = "" if can_reclaim else " The KV cache holds what must be kept, so its memory cannot be lent."
        raise OutOfMemoryError(
            f"a weight update needs {layer} bytes for the largest layer and {reachable} can be free; no weight was "
            f"changed.{why} Free {layer - reachable} bytes, or end requests first.",
            wanted=layer,
            free=reachable,
        )
    if reachable < wanted:
        logger.warning("A weight update should have %d bytes but will find %d: it may fail.", wanted, reachable)
    if not can_reclaim:
        return LendReport(wanted, free, False, 0)
    if connector is not None:
        connector.refuse_transfers()
    released = let_go(cache, connector, {})
    logger.info("KV cache lent to a weight update: %d bytes given back.", released.given_back)
    return LendReport(wanted, free, True, released.given_back)


def _nobody_holds(connector: SleepsWithPeers | None) -> bool:
    held = () if connector is None else tuple(connector.holders())
    if held:
        logger.warning("%d request(s) hold blocks, so the KV cache is not lent: %s", len(held), ", ".join(held[:8]))
    return not held


def _free(cache: GrowableKVCache) -> int:
    """Free bytes as the driver counts them, with what torch keeps for reuse given back first."""
    device = _cuda_device(cache)
    if device is not None:
        import torch

        torch.cuda.empty_cache()
    return cache.driver.memory_info().free


def _cuda_device(cache: GrowableKVCache) -> int | None:
    if cache.driver.name not in ("cuda", "hip"):
        return None
    import torch

    return cache.driver.device_id if torch.cuda.is_available() else None


@contextmanager
def _uncapped(cache: GrowableKVCache) -> Iterator[None]:
    """Torch's own limit on the device is lifted inside, and as it was afterwards."""
    device = _cuda_device(cache)
    if device is None:
        yield
        return
    import torch

    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    try:
        yield
    finally:
        # What loading left in torch's cache would count against the cap and be missing for the KV cache.
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(before, device)
