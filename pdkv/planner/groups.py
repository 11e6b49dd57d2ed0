"""How layers share blocks: vLLM's cache groups, the bytes of a block on each pipeline stage, blocks per request.

A model whose layers are alike has one group, and a block holds one page of each layer. A hybrid has several groups of
equally many layers; each has block tables of its own, all draw on one pool, and a block holds the pages of one group.
Source: `v1/core/kv_cache_planning.py` of vLLM 0.33.0, for layer-outermost layouts (LBNHC, its default).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdkv.errors import ConfigError
from pdkv.planner.dtypes import keeps_boundary_layers
from pdkv.planner.layers import AttentionLayer, ModelShape, Page, PageFormat


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block tables.

    Attributes:
        pages: the page of each layer in the group; all have one kind and one block size.
        stages: the pipeline stage of each of them.
    """

    pages: tuple[Page, ...]
    stages: tuple[int, ...]

    def bytes_on(self, stage: int) -> int:
        """Bytes of one block of this group on a stage."""
        return sum(page.nbytes for page, where in zip(self.pages, self.stages, strict=True) if where == stage)

    def blocks_for(self, context: int, *, in_flight_tokens: int, state_blocks: int) -> int:
        """Blocks that a request of `context` tokens holds at most.

        A window holds `window - 1` tokens before the first one being computed, and may begin anywhere in a block
        (`SlidingWindowSpec.max_admission_blocks_per_request`); a short request never holds more than its own tokens.

        Args:
            in_flight_tokens: tokens of the request that are scheduled and not yet settled.
            state_blocks: blocks of a recurrent state per request.
        """
        page = self.pages[0]
        if page.kind == "state":
            return state_blocks
        whole = _ceil_div(context, page.block_size)
        if page.kind == "sliding":
            held = min(page.extent - 1 + in_flight_tokens, context)
            return min(_ceil_div(held, page.block_size) + 1, whole)
        if page.kind == "chunked":
            return _ceil_div(min(page.extent + in_flight_tokens, context), page.block_size)
        if page.kind == "cross":
            return _ceil_div(page.extent, page.block_size)
        return whole


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The groups of a model under a deployment, and what follows from them.

    Attributes:
        block_size: tokens per block of the attention groups; larger than asked for where a Mamba state needs the room.
        stages: number of pipeline stages.
    """

    groups: tuple[Group, ...]
    block_size: int
    stages: int

    def block_bytes(self, stage: int = 0) -> int:
        """Bytes of one block on one rank of a stage: those of its widest group."""
        return max((group.bytes_on(stage) for group in self.groups), default=0)

    @property
    def widest_stage(self) -> int:
        """The stage with the largest blocks, which has room for the fewest."""
        return max(range(self.stages), key=self.block_bytes)

    def segment_strides(self, stage: int) -> tuple[int, ...]:
        """Bytes per block of each segment on a stage: groups lie over one another, one segment per layer of a group."""
        widest = max(self.groups, key=lambda group: group.bytes_on(stage))
        return tuple(p.nbytes for p, where in zip(widest.pages, widest.stages, strict=True) if where == stage)

    def blocks_per_request(self, context: int, *, in_flight_tokens: int = 2, state_blocks: int = 1) -> int:
        """Blocks that one request of `context` tokens holds in all groups together."""
        return sum(
            group.blocks_for(context, in_flight_tokens=in_flight_tokens, state_blocks=state_blocks)
            for group in self.groups
        )


def cache_shape(model: ModelShape, page_format: PageFormat, pipeline_parallel: int = 1) -> CacheShape:
    """Group the layers of `model` as vLLM does.

    Raises:
        ConfigError: more stages than layers, or pages that no block size and no padding makes equal.
    """
    if pipeline_parallel > len(model.layers):
        raise ConfigError(f"Pipeline parallelism {pipeline_parallel} exceeds the {len(model.layers)} layers")
    block_size = _block_size(model, page_format)
    pages, stages = _pages(model, replace(page_format, block_size=block_size), pipeline_parallel)
    if not pages:
        raise ConfigError(f"{model.name} has no layer with a KV cache")
    if len({(page.kind, page.extent, page.block_size) for page in pages}) == 1:
        return CacheShape((Group(tuple(pages), tuple(stages)),), block_size, pipeline_parallel)
    return CacheShape(_split(_unify(pages), stages), block_size, pipeline_parallel)


def stage_of_layers(num_layers: int, stages: int) -> list[int]:
    """The pipeline stage of each layer: as even as can be, the rest on stages before the last (`get_pp_indices`)."""
    sizes = [num_layers // stages] * stages
    for i in range(2, num_layers % stages + 2):
        sizes[-i] += 1
    return [stage for stage, size in enumerate(sizes) for _ in range(size)]


def _pages(model: ModelShape, page_format: PageFormat, stages: int) -> tuple[list[Page], list[int]]:
    """The page of every cached layer and its stage, in the model's order."""
    plain = replace(page_format, kv_cache_dtype="auto")
    kept = _boundary_layers(model) if keeps_boundary_layers(page_format.kv_cache_dtype) else frozenset()
    where = stage_of_layers(len(model.layers), stages)
    pages, page_stages = [], []
    for index, block in enumerate(model.layers):
        for layer in block:
            pages.append(layer.page(plain if index in kept else page_format, model.dtype))
            page_stages.append(where[index])
    return pages, page_stages


def _boundary_layers(model: ModelShape) -> frozenset[int]:
    """The first and last two layers of a dense model; none of a hybrid."""
    count = len(model.layers)
    if model.has_state:
        return frozenset()
    edge = min(2, count // 2)
    return frozenset([*range(edge), *range(count - edge, count)])


def _block_size(model: ModelShape, page_format: PageFormat) -> int:
    """Tokens per block: in a Mamba hybrid enough for an attention page to hold a state (`_align_hybrid_block_size`)."""
    layers = [layer for block in model.layers for layer in block]
    one_token = replace(page_format, block_size=1)
    pages = [layer.page(one_token, model.dtype) for layer in layers]
    state = max((page.nbytes for page in pages if page.kind == "state"), default=0)
    token = max((page.nbytes for page in pages if page.kind != "state"), default=0)
    if not state or not token:
        return page_format.block_size
    align = max(page_format.block_size, 128) if model.is_latent else page_format.block_size
    return align * _ceil_div(state, align * token)


def _unify(pages: Sequence[Page]) -> list[Page]:
    """Make all pages equally large: larger blocks where that works out evenly, padding elsewhere."""
    largest = max(page.nbytes for page in pages)

    def fit(page: Page) -> Page:
        if page.nbytes == largest:
            return page
        if page.kind != "state" and largest % page.nbytes == 0:
            return replace(page, nbytes=largest, block_size=page.block_size * (largest // page.nbytes))
        if not page.padded:
            raise ConfigError(
                f"A page of {page.nbytes} bytes cannot be brought to the {largest} bytes of another layer's: "
                "latent pages cannot be padded. Choose another block size or KV cache dtype."
            )
        return replace(page, nbytes=largest)

    return [fit(page) for page in pages]


def _split(pages: Sequence[Page], stages: Sequence[int]) -> tuple[Group, ...]:
    """Split layers of each kind into groups of one size: the fewest layers that a kind has, or the most where that is
    less than half as many again. A kind's last group may stay short; its block is as large all the same.
    """
    kinds: dict[Page, list[int]] = {}
    for index, page in enumerate(pages):
        kinds.setdefault(page, []).append(index)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    groups = []
    for layers in kinds.values():
        number = _ceil_div(len(layers), size)
        groups += [layers[i::number] for i in range(number)]
    return tuple(Group(tuple(pages[i] for i in group), tuple(stages[i] for i in group)) for group in groups)


def bytes_per_token(model: ModelShape, page_format: PageFormat) -> int:
    """Bytes that one token adds over all ranks, replicas not counted, while every window still grows."""
    kept = _boundary_layers(model) if keeps_boundary_layers(page_format.kv_cache_dtype) else frozenset()
    plain = replace(page_format, kv_cache_dtype="auto")
    return sum(
        layer.stored_bytes(plain if index in kept else page_format, model.dtype)
        for index, block in enumerate(model.layers)
        for layer in block
        if layer.page(page_format, model.dtype).kind in ("full", "sliding", "chunked")
    )


def bytes_per_token_on_rank(model: ModelShape, page_format: PageFormat, pipeline_parallel: int = 1) -> int:
    """Bytes that one token adds on one rank of the stage where it adds most, replicas included."""
    pages, stages = _pages(model, replace(page_format, block_size=1), pipeline_parallel)
    sums = [0] * pipeline_parallel
    for page, stage in zip(pages, stages, strict=True):
        sums[stage] += page.nbytes if page.kind in ("full", "sliding", "chunked") else 0
    return max(sums)


def bytes_per_request(model: ModelShape, page_format: PageFormat, context: int) -> int:
    """Bytes that a request of `context` tokens needs over all ranks, replicas, block rounding and padding not counted:
    tokens within the window of sliding and chunked layers, the whole of states and encoder tokens.
    """
    kept = _boundary_layers(model) if keeps_boundary_layers(page_format.kv_cache_dtype) else frozenset()
    plain = replace(page_format, kv_cache_dtype="auto")
    total = 0
    for index, block in enumerate(model.layers):
        form = plain if index in kept else page_format
        for layer in block:
            stored = layer.stored_bytes(form, model.dtype)
            bound = (layer.window or layer.chunk) if isinstance(layer, AttentionLayer) else None
            once = layer.page(form, model.dtype).kind in ("state", "cross")
            total += stored if once else stored * min(context, bound or context)
    return total


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


__all__ = [
    "CacheShape",
    "Group",
    "bytes_per_request",
    "bytes_per_token",
    "bytes_per_token_on_rank",
    "cache_shape",
    "stage_of_layers",
]
