"""What fits on one engine: bytes for the KV cache, blocks, tokens, requests, and what waits for remote KV may hold."""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.kvcache.sizing import SizingConstants, measure_kv_cache_bytes
from pdkv.planner.groups import CacheShape


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory of one rank, in bytes.

    Attributes:
        total_bytes: the device's memory as its driver reports it.
        utilization: share of it that the engine may take, in (0, 1].
        weights_bytes: the model's weights on this rank.
        activation_bytes: peak of a step beyond what stays resident.
        non_torch_bytes: contexts, communication buffers, kernels' workspaces.
        graph_bytes: captured graphs.
    """

    total_bytes: int
    utilization: float
    weights_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    graph_bytes: int

    @property
    def resident_bytes(self) -> int:
        """What stays allocated beside the cache while no step runs."""
        return self.weights_bytes + self.non_torch_bytes + self.graph_bytes

    def fixed_cache_bytes(self) -> int:
        """Bytes for a cache that is sized before warmup: ``total * utilization - non_kv - graphs``.

        `non_kv` is weights, activations and memory outside torch, as vLLM's profiling run counts them.
        """
        return int(self.total_bytes * self.utilization) - self.resident_bytes - self.activation_bytes

    def growable_cache_bytes(self, constants: SizingConstants) -> int:
        """Bytes for a growable cache, measured after a warmup that left resident what this budget says."""
        return measure_kv_cache_bytes(
            init_free_memory=self.total_bytes,
            free_memory=self.total_bytes - self.resident_bytes,
            committed_bytes=0,
            requested_memory=int(self.total_bytes * self.utilization),
            transient_peak_bytes=self.activation_bytes,
            margin_floor_bytes=constants.margin_floor_bytes,
            margin_fraction=constants.margin_fraction,
        )


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a block pool holds.

    Attributes:
        cache_bytes: memory for the cache on the rank with the least room.
        block_bytes: bytes of one block on that rank.
        blocks: blocks of the pool, block 0 (which holds no tokens) included.
        watermark_blocks: blocks that must stay free when a waiting request is admitted.
        blocks_per_request: blocks of one request at the context length, in all groups.
        tokens: tokens of KV that the pool holds; for a hybrid, when all requests have the context length.
        max_requests: requests at the context length that run at a time.
        fits_one: whether one request at the context length can run at all.
    """

    cache_bytes: int
    block_bytes: int
    blocks: int
    watermark_blocks: int
    blocks_per_request: int
    tokens: int
    max_requests: int
    fits_one: bool


def blocks_within(shape: CacheShape, cache_bytes: int, granule: int, stage: int) -> int:
    """Blocks whose segments, each rounded up to granules (bytes; 0 for none), fit in `cache_bytes` on a stage."""
    if cache_bytes <= 0:
        return 0
    strides = shape.segment_strides(stage)
    if granule <= 0:
        return cache_bytes // sum(strides)

    def physical(blocks: int) -> int:
        return sum(-(-blocks * stride // granule) * granule for stride in strides)

    low, high = 0, cache_bytes // sum(strides)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if physical(middle) <= cache_bytes else (low, middle - 1)
    return low


def capacity(
    shape: CacheShape,
    cache_bytes: int,
    context: int,
    *,
    granule: int = 0,
    watermark: float = 0.01,
    in_flight_tokens: int = 2,
    state_blocks: int = 1,
) -> Capacity:
    """What a cache of `cache_bytes` per rank holds at a context length (tokens).

    All stages commit the least count over them, so the stage with the largest blocks decides.

    Args:
        granule: bytes to which each segment is rounded up; 0 for a cache that is not growable.
        watermark: share of the blocks kept free when a waiting request is admitted (`watermark` of vLLM's scheduler).

    Raises:
        ConfigError: the context is not positive or the watermark not in [0, 1).
    """
    if context < 1:
        raise ConfigError(f"The context length must be at least 1 token, not {context}")
    if not 0 <= watermark < 1:
        raise ConfigError(f"The watermark must be in [0, 1), not {watermark}")
    per_stage = [blocks_within(shape, cache_bytes, granule, stage) for stage in range(shape.stages)]
    blocks = min(per_stage)
    usable = max(0, blocks - 1)
    reserved = int(watermark * blocks)
    each = shape.blocks_per_request(context, in_flight_tokens=in_flight_tokens, state_blocks=state_blocks)
    simple = len(shape.groups) == 1 and shape.groups[0].pages[0].kind == "full"
    return Capacity(
        cache_bytes=max(0, cache_bytes),
        block_bytes=shape.block_bytes(per_stage.index(blocks)),
        blocks=blocks,
        watermark_blocks=reserved,
        blocks_per_request=each,
        tokens=usable * shape.block_size if simple else int(usable / each * context),
        max_requests=max(0, usable - reserved) // each,
        fits_one=each <= usable,
    )


@dataclass(frozen=True, slots=True)
class WaitingShare:
    """How much of D's pool requests hold that wait for remote KV: they get their blocks before they are scheduled.

    `expected_blocks` is the mean by Little's law (arrivals times transfer time times blocks of a prompt); `most_blocks`
    what they may hold in a burst, all but the watermark; `running_requests` how many at the context length still run
    beside the expected ones.
    """

    expected_blocks: int
    expected_share: float
    most_blocks: int
    running_requests: int


def waiting_share(pool: Capacity, arrivals_per_s: float, transfer_s: float, prompt_blocks: int) -> WaitingShare:
    """Blocks that requests waiting for remote KV hold on D at this arrival rate and transfer time (s)."""
    usable = max(0, pool.blocks - 1)
    most = max(0, usable - pool.watermark_blocks)
    expected = min(most, round(arrivals_per_s * transfer_s * prompt_blocks))
    running = max(0, most - expected) // pool.blocks_per_request
    return WaitingShare(expected, expected / usable if usable else 0.0, most, running)


__all__ = ["Capacity", "MemoryBudget", "WaitingShare", "blocks_within", "capacity", "waiting_share"]
