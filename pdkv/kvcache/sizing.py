"""How many blocks fit, from what warmup really used. Pure functions over numbers; no engine, no torch.

The order of a start-up (all sizes in bytes):

1. :func:`resolve_utilization` gives the share of the device that the engine may take.
2. :func:`committable_blocks` says what warmup may commit; warmup runs.
3. The engine reads a :class:`MemoryReading` (`pdkv.kvcache.torch_allocator` does so for torch), and
   :func:`decide_final_blocks` says how many blocks to commit, the same on all ranks.
4. :func:`require_room_for_one_request` refuses a count with which an engine would starve in silence.

The formula and the names are those of vLLM's growable cache (pull request 50779).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pdkv.errors import CapacityError, ConfigError
from pdkv.kvcache.sizing_constants import GIB, MIB, SizingConstants, check_utilization

_log = logging.getLogger(__name__)
_DEFAULTS = SizingConstants()

AgreeMinimum = Callable[[int], int]
"""Returns the minimum of its argument over all ranks. A collective: every rank calls it, or all of them wait."""

Reason = Literal["explicit", "measured", "shrunk", "kept-warmup", "first-pass"]


class SizedCache(Protocol):
    """What sizing asks of a cache; :class:`pdkv.kvcache.GrowableKVCache` has it."""

    @property
    def capacity_blocks(self) -> int: ...
    @property
    def num_committed_blocks(self) -> int: ...
    @property
    def physical_bytes(self) -> int: ...
    def physical_bytes_for(self, num_blocks: int, /) -> int: ...
    def blocks_within(self, nbytes: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """What was measured on one rank after warmup, with the framework's own cache emptied. All in bytes.

    Attributes:
        init_free_memory: free on the device before the engine took anything.
        free_memory: free on the device now.
        requested_memory: what the engine may take in all: total memory times utilization.
        transient_peak_bytes: what a step needs beyond what stays resident; see :func:`transient_peak`.
        multimodal_ipc_bytes: what a front end that decodes media on this device takes; kept out of the cache.
    """

    init_free_memory: int
    free_memory: int
    requested_memory: int
    transient_peak_bytes: int = 0
    multimodal_ipc_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FinalSize:
    """How many blocks to commit for good, why, and a sentence for the log.

    `local_blocks` is this rank's own count; `blocks` is the least over all ranks. `cache_bytes` is what this rank found
    room for, before rounding to blocks; None where nothing was measured.
    """

    blocks: int
    local_blocks: int
    reason: Reason
    cache_bytes: int | None
    message: str


def measure_kv_cache_bytes(
    *,
    init_free_memory: int,
    free_memory: int,
    committed_bytes: int,
    requested_memory: int,
    transient_peak_bytes: int = 0,
    margin_floor_bytes: int = _DEFAULTS.margin_floor_bytes,
    margin_fraction: float = _DEFAULTS.margin_fraction,
) -> int:
    """Bytes that the whole KV cache may take, committed prefix included. Never below 0.

    ``min(requested - non_kv_used, headroom - margin) - transient_peak`` with ``non_kv_used = init_free - free -
    committed``, ``headroom = free + committed`` and ``margin = max(floor, fraction * transient_peak)``. The margin
    guards physical memory, so a budget that already leaves that much free is not reduced by it. Source: vLLM 50779.
    """
    non_kv_used = init_free_memory - free_memory - committed_bytes
    headroom = free_memory + committed_bytes
    margin = max(margin_floor_bytes, int(margin_fraction * transient_peak_bytes))
    return max(0, min(requested_memory - non_kv_used, headroom - margin) - transient_peak_bytes)


def transient_peak(
    *, profiled_activation_bytes: int, warmup_allocated_peak_bytes: int, resident_allocated_bytes: int
) -> int:
    """The larger of the profiled activation peak and warmup's, in bytes.

    Warmup's is the highest sum of live allocations during warmup less what stays allocated after it. Live, not
    reserved: what an allocator keeps in its cache is given back on demand and would be counted as needed.
    """
    return max(profiled_activation_bytes, warmup_allocated_peak_bytes - resident_allocated_bytes, 0)


def resolve_utilization(
    requested: float | None,
    *,
    growable: bool,
    other_processes: Sequence[str] = (),
    constants: SizingConstants = _DEFAULTS,
) -> float:
    """The share of the device's memory that the engine may take.

    Unspecified (None) means `growable_utilization` where the cache can grow and `fixed_utilization` where it cannot; an
    engine that falls back to a fixed cache calls again with ``growable=False``. On a device that other processes use, a
    growable cache left to itself would take what they need next, so there it must be said.

    Args:
        other_processes: a description of each other process on the device, for the message.

    Raises:
        ConfigError: `requested` is out of (0, 1], or nothing was requested for a growable cache on a shared device.
    """
    if requested is not None:
        return check_utilization(requested)
    if not growable:
        return constants.fixed_utilization
    if other_processes:
        raise ConfigError(
            f"This device is used by {len(other_processes)} other process(es) ({'; '.join(other_processes)}). A "
            "growable KV cache would take all that they leave free now; set every engine's memory utilization."
        )
    return constants.growable_utilization


def committable_blocks(
    cache: SizedCache,
    *,
    free_memory: int,
    activation_peak_bytes: int = 0,
    limit_bytes: int | None = None,
    constants: SizingConstants = _DEFAULTS,
    agree_minimum: AgreeMinimum | None = None,
) -> int:
    """Blocks that warmup may commit without eating into the headroom, the same on all ranks.

    Free memory plus the committed prefix, less a reserve (the larger of the profiled activation peak and
    `warmup_reserve_fraction` of the headroom), less the margin over that reserve. Never below what is committed
    already, nor above the capacity. The ranks agree because a rank that skips a warmup step leaves the others waiting
    in it.

    Args:
        free_memory: bytes free on the device now.
        activation_peak_bytes: the profiled peak that warmup is about to meet.
        limit_bytes: most that the cache may ever take, where the caller knows; an explicit budget, for example.
        agree_minimum: the minimum over ranks; None with a single rank.
    """
    headroom = free_memory + cache.physical_bytes
    reserve = max(activation_peak_bytes, int(headroom * constants.warmup_reserve_fraction))
    margin = max(constants.margin_floor_bytes, int(reserve * constants.margin_fraction))
    budget = headroom - reserve - margin
    if limit_bytes is not None:
        budget = min(budget, limit_bytes)
    local = max(cache.blocks_within(max(budget, 0)), cache.num_committed_blocks)
    return _agree(min(local, cache.capacity_blocks), agree_minimum)


def decide_final_blocks(
    cache: SizedCache,
    *,
    reading: MemoryReading | None = None,
    explicit_bytes: int | None = None,
    first_pass_blocks: int | None = None,
    constants: SizingConstants = _DEFAULTS,
    agree_minimum: AgreeMinimum | None = None,
) -> FinalSize:
    """How many blocks to commit for good. The first of these that applies:

    - `explicit_bytes`: as many blocks as they hold, whatever was measured;
    - no `reading`, because warmup was skipped: `first_pass_blocks`, the estimate made before warmup;
    - the reading leaves no room for a single block: what warmup committed, since it ran with that, with a warning;
    - the reading leaves room for fewer blocks than warmup committed: those; the caller remaps (``shrink=True``);
    - otherwise what :func:`measure_kv_cache_bytes` leaves.

    Every rank calls `agree_minimum` exactly once, whatever it found; errors are raised after it, on all ranks alike.

    Raises:
        ConfigError: neither `explicit_bytes` nor `reading` nor `first_pass_blocks` was given.
        CapacityError: not one block fits on some rank.
    """
    local, reason, cache_bytes, message = _decide_local(cache, reading, explicit_bytes, first_pass_blocks, constants)
    blocks = _agree(local, agree_minimum)
    if blocks < 1:
        one = cache.physical_bytes_for(1)
        raise CapacityError(
            f"No block of the KV cache fits on some rank (this one: {local}). {message} One block takes {one} bytes "
            "here; raise the KV budget or the memory utilization, or free memory on the device."
        )
    if blocks < local:
        message += f" Another rank has room for {blocks} blocks only, so all commit {blocks}."
    _log.log(logging.WARNING if reason == "kept-warmup" else logging.INFO, "%s", message)
    return FinalSize(blocks, local, reason, cache_bytes, message)


def require_room_for_one_request(
    num_blocks: int, block_size: int, max_model_len: int, *, null_blocks: int = 1, bytes_per_block: int | None = None
) -> None:
    """Refuse a block count with which a request of `max_model_len` tokens could never be scheduled.

    vLLM checks this against its estimate before warmup, not against a count that is set afterwards: a request that
    needs more blocks than the pool has then waits for ever, without a message.

    Args:
        null_blocks: blocks that hold no request's tokens; vLLM sets block 0 aside.
        bytes_per_block: over all layers of one rank; makes the message say how many bytes are missing.

    Raises:
        CapacityError: the count is too small. The message says what would be enough.
        ConfigError: a size is not positive.
    """
    if block_size < 1 or max_model_len < 1:
        raise ConfigError(f"block_size and max_model_len must be at least 1, not {block_size} and {max_model_len}")
    needed = -(-max_model_len // block_size) + null_blocks
    if num_blocks >= needed:
        return
    fits = max(0, num_blocks - null_blocks) * block_size
    more = "" if bytes_per_block is None else f" ({(needed - num_blocks) * bytes_per_block} bytes more per rank)"
    shorter = f", or set max_model_len to {fits} or less" if fits else ""
    raise CapacityError(
        f"One request of max_model_len={max_model_len} tokens needs {needed} blocks of {block_size} tokens, of which "
        f"{null_blocks} is/are set aside; the KV cache has {num_blocks}, so such a request would never be scheduled. "
        f"Give the KV cache room for {needed} blocks{more}{shorter}."
    )


def _decide_local(
    cache: SizedCache,
    reading: MemoryReading | None,
    explicit_bytes: int | None,
    first_pass_blocks: int | None,
    constants: SizingConstants,
) -> tuple[int, Reason, int | None, str]:
    """This rank's blocks, the reason, the bytes found, and the sentence for the log."""
    if explicit_bytes is not None:
        blocks = cache.blocks_within(max(explicit_bytes, 0))
        return blocks, "explicit", explicit_bytes, f"KV cache: {blocks} blocks in the {_gib(explicit_bytes)} asked for."
    if reading is None:
        if first_pass_blocks is None:
            raise ConfigError("decide_final_blocks needs explicit_bytes, a reading after warmup, or first_pass_blocks")
        blocks = min(first_pass_blocks, cache.capacity_blocks)
        return blocks, "first-pass", None, f"KV cache: {blocks} blocks as estimated, since warmup was skipped."
    nbytes = measure_kv_cache_bytes(
        init_free_memory=reading.init_free_memory,
        free_memory=reading.free_memory,
        committed_bytes=cache.physical_bytes,
        requested_memory=reading.requested_memory,
        transient_peak_bytes=reading.transient_peak_bytes,
        margin_floor_bytes=constants.margin_floor_bytes,
        margin_fraction=constants.margin_fraction,
    )
    nbytes = max(0, nbytes - reading.multimodal_ipc_bytes)
    blocks, proved = cache.blocks_within(nbytes), cache.num_committed_blocks
    if blocks < 1:
        text = f"No memory is left for the KV cache after warmup ({_gib(nbytes)}): it keeps the {proved} blocks that "
        text += "warmup ran with, without a margin. Lower max_num_batched_tokens, or free memory on the device."
        return proved, "kept-warmup", nbytes, text
    if blocks < proved:
        text = f"Warmup committed {proved} blocks, but the {_gib(nbytes)} measured after it hold {blocks}: remapping."
        return blocks, "shrunk", nbytes, text
    return blocks, "measured", nbytes, f"KV cache: {blocks} blocks in the {_gib(nbytes)} measured after warmup."


def _agree(value: int, agree_minimum: AgreeMinimum | None) -> int:
    if agree_minimum is None:
        return value
    agreed = agree_minimum(value)
    if agreed > value:
        raise ConfigError(f"agree_minimum returned {agreed} for {value}: it must give the least value over all ranks")
    return agreed


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 8 else f"{nbytes / MIB:.1f} MiB"


__all__ = [
    "AgreeMinimum",
    "FinalSize",
    "MemoryReading",
    "SizedCache",
    "SizingConstants",
    "committable_blocks",
    "decide_final_blocks",
    "measure_kv_cache_bytes",
    "require_room_for_one_request",
    "resolve_utilization",
    "transient_peak",
]
