"""From a question (model, GPU, settings, traffic) to a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pdkv.errors import ConfigError
from pdkv.kvcache.sizing import SizingConstants, resolve_utilization
from pdkv.planner.advice import Remedy, Situation, remedies
from pdkv.planner.capacity import Capacity, MemoryBudget, WaitingShare, capacity, waiting_share
from pdkv.planner.groups import (
    CacheShape,
    bytes_per_request,
    bytes_per_token,
    bytes_per_token_on_rank,
    cache_shape,
)
from pdkv.planner.layers import ModelShape, PageFormat
from pdkv.planner.model_config import read_model
from pdkv.planner.presets import ModelSource, find_model, gpu_memory
from pdkv.planner.transfer import EngineRatio, LeasePressure, LinkNeed, engine_ratio, lease_pressure, link_need

#: Peak of a step beyond what stays resident, where nothing was said. An assumption: it depends on the model, on
#: max_num_batched_tokens and on the vocabulary; an engine's log has the measured value.
ASSUMED_ACTIVATION_BYTES = 2 << 30
#: Memory of a CUDA context: total less free right after creating one on an H200 (driver 580.159). NCCL comes on top.
ASSUMED_NON_TORCH_BYTES = 552_402_944
#: Captured graphs, where nothing was said. An assumption; an engine's log has the measured value.
ASSUMED_GRAPH_BYTES = 512 << 20
#: Smallest chunk of CUDA virtual memory, to which a growable cache rounds each segment.
CUDA_GRANULE_BYTES = 2 << 20
# Beyond every rate, length and count there is; products and ratios of a few such numbers still fit a float.
_LARGEST = 1e18


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests as they arrive, and what the engines and the link do. Times in seconds, rates per second.

    `ttft_s` is the target for the time to first token, `queue_s` the time that a request waits before its transfer,
    `time_per_token_s` the time between two tokens of one request. What is None is not planned for.
    """

    arrivals_per_s: float
    prompt_tokens: int
    output_tokens: int = 256
    queue_s: float = 0.0
    ttft_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    link_bytes_per_s: float | None = None
    time_per_token_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no traffic is: rates, lengths and times that are not finite and above 0 (waiting may be 0).

        Raises:
            ConfigError: the message names the value.
        """
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if value is None or (field_.name == "queue_s" and value == 0):
                continue
            if not 1 / _LARGEST <= value <= _LARGEST:
                raise ConfigError(f"{field_.name} must be above 0, and at most {_LARGEST:g}, not {value}")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A question to the planner. Sizes in bytes and per rank where not said otherwise; None means find out or assume.

    Attributes:
        model: a preset, a config.json or a model's folder.
        gpu: a preset or a size such as "141GiB"; not needed with `cache_bytes`.
        cache_bytes: memory for the KV cache on a rank, in place of working it out from the GPU.
        weights_bytes: weights over all ranks.
        growable: whether the cache is sized after warmup (pdkv) or before it (stock).
        granule: to which each segment of a growable cache is rounded.
    """

    model: str
    gpu: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    model_dtype: str | None = None
    context: int | None = None
    concurrency: int | None = None
    utilization: float | None = None
    growable: bool = True
    granule: int = CUDA_GRANULE_BYTES
    cache_bytes: int | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graph_bytes: int | None = None
    watermark: float = 0.01
    in_flight_tokens: int = 2
    state_blocks: int = 1
    traffic: Traffic | None = None
    constants: SizingConstants = field(default_factory=SizingConstants)

    @property
    def page_format(self) -> PageFormat:
        return PageFormat(self.tensor_parallel, self.block_size, self.kv_cache_dtype)


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `assumed` names the sizes that were neither given nor known; `other` is the same pool with the other
    kind of cache (fixed for growable and the other way round), None where the cache's bytes were given.
    """

    request: PlanRequest
    model: ModelShape
    shape: CacheShape
    context: int
    budget: MemoryBudget | None
    pool: Capacity
    other: Capacity | None
    bytes_per_token: int
    bytes_per_token_per_rank: int
    bytes_per_request: int
    assumed: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    link: LinkNeed | None = None
    leases: LeasePressure | None = None
    waiting: WaitingShare | None = None
    ratio: EngineRatio | None = None

    @property
    def concurrency_fits(self) -> bool | None:
        """Whether as many requests run at once as were asked for; None where nothing was asked."""
        wanted = self.request.concurrency
        return None if wanted is None else self.pool.max_requests >= wanted

    def as_dict(self) -> dict[str, Any]:
        """For programs: plain values only, the keys of the documentation."""
        return {
            "model": self.model.name,
            "context": self.context,
            "tensor_parallel": self.request.tensor_parallel,
            "pipeline_parallel": self.request.pipeline_parallel,
            "kv_cache_dtype": self.request.kv_cache_dtype,
            "block_size": self.shape.block_size,
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_token_per_rank": self.bytes_per_token_per_rank,
            "bytes_per_request": self.bytes_per_request,
            "bytes_per_block_per_rank": self.pool.block_bytes,
            "cache_groups": len(self.shape.groups),
            "cache_bytes_per_rank": self.pool.cache_bytes,
            "blocks": self.pool.blocks,
            "watermark_blocks": self.pool.watermark_blocks,
            "blocks_per_request": self.pool.blocks_per_request,
            "tokens": self.pool.tokens,
            "max_requests": self.pool.max_requests,
            "fits_one": self.pool.fits_one,
            "concurrency_fits": self.concurrency_fits,
            "growable": self.request.growable,
            "other_kind": None if self.other is None else asdict(self.other),
            "memory": None if self.budget is None else asdict(self.budget),
            "assumed": list(self.assumed),
            "link": None if self.link is None else asdict(self.link),
            "leases": None if self.leases is None else asdict(self.leases),
            "waiting_for_remote_kv": None if self.waiting is None else asdict(self.waiting),
            "engines": None if self.ratio is None else asdict(self.ratio),
            "remedies": [asdict(remedy) for remedy in self.remedies],
        }


def make_plan(request: PlanRequest) -> Plan:
    """Answer a question.

    Raises:
        ConfigError: a name is unknown, fields are missing, or sizes do not go together. The message says what to give.
    """
    for name in ("tensor_parallel", "pipeline_parallel", "block_size", "in_flight_tokens"):
        if not 1 <= getattr(request, name) <= _LARGEST:
            raise ConfigError(f"{name} must be at least 1, and at most {_LARGEST:g}, not {getattr(request, name)}")
    if request.context is not None and request.context > _LARGEST:
        raise ConfigError(f"The context length must be at most {_LARGEST:g} tokens, not {request.context}")
    source = find_model(request.model)
    model = read_model(source.config, source.name)
    if request.model_dtype is not None:
        model = replace(model, dtype=request.model_dtype)
    context = request.context or model.max_context
    if context is None:
        raise ConfigError(f"{model.name} names no longest context; give --context")
    shape = cache_shape(model, request.page_format, request.pipeline_parallel)
    budget, assumed = (None, ()) if request.cache_bytes is not None else _budget(request, source)
    pool = _pool(request, shape, context, budget)
    plan = Plan(
        request=request,
        model=model,
        shape=shape,
        context=context,
        budget=budget,
        pool=pool,
        other=None if budget is None else _other_pool(request, shape, context, source),
        bytes_per_token=bytes_per_token(model, request.page_format),
        bytes_per_token_per_rank=bytes_per_token_on_rank(model, request.page_format, request.pipeline_parallel),
        bytes_per_request=bytes_per_request(model, request.page_format, context),
        assumed=assumed,
        remedies=() if pool.fits_one else _remedies(request, model, context, source),
    )
    return plan if request.traffic is None else _with_traffic(plan, request.traffic)


def _budget(request: PlanRequest, source: ModelSource) -> tuple[MemoryBudget, tuple[str, ...]]:
    """Memory of a rank, and which of its parts are assumptions."""
    if request.gpu is None:
        raise ConfigError("Give --gpu (a preset or a size), or --kv-bytes for the cache itself")
    weights = request.weights_bytes if request.weights_bytes is not None else source.weights_bytes
    if weights is None:
        raise ConfigError(f"The weights of {source.name} are not beside its config.json; give their size as --weights")
    parts = {
        "activation_bytes": (request.activation_bytes, ASSUMED_ACTIVATION_BYTES),
        "non_torch_bytes": (request.non_torch_bytes, ASSUMED_NON_TORCH_BYTES),
        "graph_bytes": (request.graph_bytes, ASSUMED_GRAPH_BYTES),
    }
    sizes = {name: assumed if given is None else given for name, (given, assumed) in parts.items()}
    budget = MemoryBudget(
        total_bytes=gpu_memory(request.gpu),
        utilization=resolve_utilization(request.utilization, growable=request.growable, constants=request.constants),
        weights_bytes=-(-weights // (request.tensor_parallel * request.pipeline_parallel)),
        **sizes,
    )
    return budget, tuple(name for name, (given, _) in parts.items() if given is None)


def _cache_bytes(request: PlanRequest, budget: MemoryBudget | None) -> int:
    if request.cache_bytes is not None:
        return request.cache_bytes
    if budget is None:
        raise ConfigError("Give --gpu, or --kv-bytes for the cache itself")
    return budget.growable_cache_bytes(request.constants) if request.growable else budget.fixed_cache_bytes()


def _pool(request: PlanRequest, shape: CacheShape, context: int, budget: MemoryBudget | None) -> Capacity:
    return capacity(
        shape,
        _cache_bytes(request, budget),
        context,
        granule=request.granule if request.growable else 0,
        watermark=request.watermark,
        in_flight_tokens=request.in_flight_tokens,
        state_blocks=request.state_blocks,
    )


def _other_pool(request: PlanRequest, shape: CacheShape, context: int, source: ModelSource) -> Capacity:
    """The pool of the other kind of cache, at the utilization that is usual for it."""
    swapped = replace(request, growable=not request.growable, utilization=None)
    return _pool(swapped, shape, context, _budget(swapped, source)[0])


def _remedies(request: PlanRequest, model: ModelShape, context: int, source: ModelSource) -> tuple[Remedy, ...]:
    def cache_bytes_at(tensor_parallel: int, pipeline_parallel: int) -> int:
        changed = replace(request, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
        return _cache_bytes(changed, None if changed.cache_bytes is not None else _budget(changed, source)[0])

    situation = Situation(
        model=model,
        page_format=request.page_format,
        pipeline_parallel=request.pipeline_parallel,
        context=context,
        granule=request.granule if request.growable else 0,
        in_flight_tokens=request.in_flight_tokens,
        state_blocks=request.state_blocks,
        cache_bytes_at=cache_bytes_at,
    )
    return remedies(situation)


def _with_traffic(plan: Plan, traffic: Traffic) -> Plan:
    """Add what the traffic asks of link, leases and engines, as far as its rates were given."""
    request = plan.request
    moved = bytes_per_request(plan.model, request.page_format, traffic.prompt_tokens)
    blocks = plan.shape.blocks_per_request(
        traffic.prompt_tokens, in_flight_tokens=request.in_flight_tokens, state_blocks=request.state_blocks
    )
    link = None
    if traffic.ttft_s is not None and traffic.prefill_tokens_per_s is not None:
        link = link_need(
            moved,
            prompt_tokens=traffic.prompt_tokens,
            ttft_s=traffic.ttft_s,
            prefill_tokens_per_s=traffic.prefill_tokens_per_s,
            queue_s=traffic.queue_s,
            arrivals_per_s=traffic.arrivals_per_s,
            link_bytes_per_s=traffic.link_bytes_per_s,
        )
    transfer_s = moved / traffic.link_bytes_per_s if traffic.link_bytes_per_s else 0.0
    ratio = None
    if traffic.prefill_tokens_per_s is not None and traffic.decode_tokens_per_s is not None:
        ratio = engine_ratio(
            arrivals_per_s=traffic.arrivals_per_s,
            prompt_tokens=traffic.prompt_tokens,
            output_tokens=traffic.output_tokens,
            prefill_tokens_per_s=traffic.prefill_tokens_per_s,
            decode_tokens_per_s=traffic.decode_tokens_per_s,
            max_requests=plan.pool.max_requests,
            time_per_token_s=traffic.time_per_token_s,
        )
    return replace(
        plan,
        link=link,
        leases=lease_pressure(traffic.arrivals_per_s, traffic.queue_s, transfer_s, blocks),
        waiting=waiting_share(plan.pool, traffic.arrivals_per_s, transfer_s, blocks),
        ratio=ratio,
    )


__all__ = ["Plan", "PlanRequest", "Traffic", "make_plan"]
