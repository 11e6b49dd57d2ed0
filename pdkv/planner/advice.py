"""What to do when a context does not fit on one engine: what each way saves, and whether it is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pdkv.errors import ConfigError
from pdkv.planner.capacity import blocks_within
from pdkv.planner.groups import CacheShape, bytes_per_request, cache_shape
from pdkv.planner.layers import LatentLayer, ModelShape, PageFormat

#: Rank and rotary part of DeepSeek-V3's latent; what a model of the same depth would keep per layer with MLA.
_REFERENCE_LATENT = LatentLayer(512, 64)

_DTYPES = {
    "fp8": "half of 16 bits; needs calibrated scales for best quality",
    "nvfp4": "4 bits and a scale per 16; FlashInfer on Blackwell",
    "int4_per_token_head": "4 bits and a float32 scale per token and head; Triton attention",
}


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way to make a context fit.

    Attributes:
        what: the change, as one would set it.
        bytes_per_rank: KV of one request on the rank with the largest blocks, blocks and padding included.
        fits: whether the cache of a rank then holds it.
        note: what it costs, or why it does not apply.
        host_bytes: memory of the host that it needs, over all ranks; 0 where none.
    """

    what: str
    bytes_per_rank: int
    fits: bool
    note: str
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Situation:
    """A deployment, and a context that is to fit into it.

    `cache_bytes_at` gives a rank's cache for a tensor and a pipeline parallel degree, as weights move off a rank when
    there are more of them. The other fields are those of :class:`pdkv.planner.plan.PlanRequest`.
    """

    model: ModelShape
    page_format: PageFormat
    pipeline_parallel: int
    context: int
    granule: int
    in_flight_tokens: int
    state_blocks: int
    cache_bytes_at: Callable[[int, int], int]

    @property
    def shape(self) -> CacheShape:
        return cache_shape(self.model, self.page_format, self.pipeline_parallel)

    def needed_blocks(self) -> int:
        """Blocks of one request."""
        return self.shape.blocks_per_request(
            self.context, in_flight_tokens=self.in_flight_tokens, state_blocks=self.state_blocks
        )

    def usable_blocks(self) -> int:
        """Blocks of the pool that can hold tokens."""
        shape = self.shape
        cache_bytes = self.cache_bytes_at(self.page_format.tensor_parallel, self.pipeline_parallel)
        return max(0, min(blocks_within(shape, cache_bytes, self.granule, s) for s in range(shape.stages)) - 1)

    def as_remedy(self, what: str, note: str) -> Remedy:
        """This deployment as a remedy."""
        shape, needed = self.shape, self.needed_blocks()
        return Remedy(what, needed * shape.block_bytes(shape.widest_stage), needed <= self.usable_blocks(), note)


def remedies(at: Situation) -> tuple[Remedy, ...]:
    """Every way there is: a smaller dtype, more ranks, both, more stages, the host, another model."""
    return (*_dtypes(at), *_more_ranks(at), *_both(at), *_more_stages(at), _host(at), _latent(at))


def _dtypes(at: Situation) -> Iterator[Remedy]:
    """Smaller KV dtypes. Those that the model cannot take are left out."""
    now = at.as_remedy("", "").bytes_per_rank
    for dtype, note in _DTYPES.items():
        changed = replace(at, page_format=replace(at.page_format, kv_cache_dtype=dtype))
        try:
            remedy = changed.as_remedy(f"--kv-cache-dtype {dtype}", note)
        except ConfigError:  # not for this model's heads; nothing to offer
            continue
        if remedy.bytes_per_rank < now:
            yield remedy


def _rank_degrees(at: Situation) -> Iterator[Situation]:
    """The deployment on twice as many ranks, four times and so on, up to the KV heads: beyond, ranks hold replicas."""
    degree = at.page_format.tensor_parallel * 2
    while degree <= at.model.max_kv_heads and at.model.max_kv_heads % degree == 0:
        yield replace(at, page_format=replace(at.page_format, tensor_parallel=degree))
        degree *= 2


def _more_ranks(at: Situation) -> Iterator[Remedy]:
    if at.model.is_latent:
        degree = at.page_format.tensor_parallel * 2
        changed = replace(at, page_format=replace(at.page_format, tensor_parallel=degree))
        note = "every rank holds the whole latent, so only the weights move; use pipeline or context parallelism"
        yield changed.as_remedy(f"--tp {degree}", note)
    for changed in _rank_degrees(at):
        degree = changed.page_format.tensor_parallel
        yield changed.as_remedy(f"--tp {degree}", f"{degree * at.pipeline_parallel} GPUs for one engine")


def _both(at: Situation) -> Iterator[Remedy]:
    """fp8 on more ranks: the first that fits."""
    if at.page_format.kv_cache_dtype.startswith("fp8"):
        return
    for changed in _rank_degrees(replace(at, page_format=replace(at.page_format, kv_cache_dtype="fp8"))):
        degree = changed.page_format.tensor_parallel
        remedy = changed.as_remedy(f"--kv-cache-dtype fp8 --tp {degree}", "both")
        if remedy.fits:
            yield remedy
            return


def _more_stages(at: Situation) -> Iterator[Remedy]:
    for degree in (at.pipeline_parallel * factor for factor in (2, 4, 8)):
        if degree <= len(at.model.layers):
            changed = replace(at, pipeline_parallel=degree)
            yield changed.as_remedy(f"--pp {degree}", "divides the layers; adds latency to each token")


def _host(at: Situation) -> Remedy:
    """Keep what the devices cannot hold in host memory: one copy, whatever replicas the ranks hold."""
    needed = at.needed_blocks()
    missing = max(0, needed - at.usable_blocks())
    note = "attention over the part on the host needs it copied in for every step, or an engine that computes there"
    spill = bytes_per_request(at.model, at.page_format, at.context) * missing // needed
    return replace(at.as_remedy("a host tier", note), fits=True, host_bytes=spill)


def _latent(at: Situation) -> Remedy:
    """A model with MLA of the same depth: nothing one can set, but what a choice of model would save."""
    if at.model.is_latent:
        return at.as_remedy("a model with MLA", "this one has MLA already")
    twin = replace(at.model, layers=tuple((_REFERENCE_LATENT,) for _ in at.model.layers))
    note = f"{len(at.model.layers)} layers with a latent of 512+64, as DeepSeek-V3 has, in place of KV heads"
    changed = replace(at, model=twin, page_format=replace(at.page_format, kv_cache_dtype="auto"))
    return changed.as_remedy("a model with MLA", note)


__all__ = ["Remedy", "Situation", "remedies"]
