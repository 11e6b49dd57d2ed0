"""Which pages of one cache become which pages of the other: a pair of geometries as the few plans that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdkv.errors import GeometryError
from pdkv.transfer.fit import model_difference
from pdkv.transfer.geometry import CacheGeometry, LayerRun
from pdkv.transfer.shards import HeadSlice
from pdkv_connectors.ipc.hashing import WORD_NBYTES, granule_states
from pdkv_connectors.ipc.plan import PagePlan, PageShape, plan_pages


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """One layer of a cache.

    Attributes:
        group: its KV-cache group.
        shape: its pages.
        offset: bytes from the cache's base to block 0's page.
        sum_offset: bytes from the beginning of the cache's table of sums to block 0's first one.
    """

    group: int
    shape: PageShape
    offset: int
    sum_offset: int


@dataclass(frozen=True, slots=True)
class Leg:
    """The layers of a group that take the same plan: one launch of a kernel. Offsets in bytes, one for each layer.

    Attributes:
        source_offsets, destination_offsets: from each cache's base to block 0's page.
        sum_offsets: in the source's table of sums, to block 0's first sum.
        layers: index of each layer among all layers of the destination.
    """

    plan: PagePlan
    source_offsets: tuple[int, ...]
    destination_offsets: tuple[int, ...]
    sum_offsets: tuple[int, ...]
    layers: tuple[int, ...]


def shape_of(run: LayerRun) -> PageShape:
    """The pages of a run of layers."""
    return PageShape(
        run.num_heads,
        run.num_states,
        run.content_nbytes,
        run.head_stride,
        run.state_stride,
        run.block_stride,
        run.dtype or None,
        run.interior,
    )


def layer_places(geometry: CacheGeometry) -> Iterator[LayerPlace]:
    """Every layer, in the order of the geometry. Their sums follow each other: ``[layer][block][H][N / G]``."""
    position = 0
    for run in geometry.layers:
        shape = shape_of(run)
        for layer in range(run.count):
            yield LayerPlace(run.group, shape, run.offset + layer * run.layer_stride, position)
            position += geometry.num_blocks * shape.sums * WORD_NBYTES


def sums_nbytes(geometry: CacheGeometry) -> int:
    """Bytes of the table of sums of a cache."""
    return sum(run.count * geometry.num_blocks * shape_of(run).sums for run in geometry.layers) * WORD_NBYTES


def legs_between(
    source: CacheGeometry, destination: CacheGeometry, heads: HeadSlice | None = None, *, quantize: bool = False
) -> tuple[tuple[Leg, ...], ...]:
    """The legs of every KV-cache group.

    Args:
        heads: which heads are copied, where the sides have different numbers of them.
        quantize: write bf16 as fp8.

    Raises:
        GeometryError: the two do not fit together; the message names the first difference.
    """
    if (difference := model_difference(source, destination)) is not None:
        raise GeometryError(difference)
    _check_tokens(source, destination)
    found: list[dict[PagePlan, list[tuple[int, LayerPlace, LayerPlace]]]] = [{} for _ in source.groups]
    pairs = zip(layer_places(source), layer_places(destination), strict=True)
    for number, (left, right) in enumerate(pairs):
        if heads is None and left.shape.num_heads != right.shape.num_heads:
            raise GeometryError(
                f"the source has {left.shape.num_heads} heads in layer {number} and the destination "
                f"{right.shape.num_heads}; say which of them are wanted, or run both with the same parallelism"
            )
        # With one head on both sides, as in MLA, every rank holds all of it.
        wanted = None if left.shape.num_heads == right.shape.num_heads == 1 else heads
        plan = plan_pages(left.shape, right.shape, wanted, quantize=quantize)
        found[left.group].setdefault(plan, []).append((number, left, right))
    return tuple(_legs(number, plans) for number, plans in enumerate(found))


def _legs(group: int, plans: dict[PagePlan, list[tuple[int, LayerPlace, LayerPlace]]]) -> tuple[Leg, ...]:
    if len({(plan.source_units, plan.destination_units) for plan in plans}) > 1:
        raise GeometryError(
            f"layers of KV-cache group {group} have different block sizes; give them groups of their own"
        )
    return tuple(
        Leg(
            plan,
            tuple(left.offset for _, left, _ in layers),
            tuple(right.offset for _, _, right in layers),
            tuple(left.sum_offset for _, left, _ in layers),
            tuple(number for number, _, _ in layers),
        )
        for plan, layers in plans.items()
    )


def require_words(geometry: CacheGeometry, otherwise: str) -> None:
    """Refuse a cache whose pages are not runs of 64-bit words, as which they are copied and summed.

    What takes them for such would go astray in memory.

    Args:
        otherwise: what can be done about it, beside another layout or model; the end of the sentence.

    Raises:
        GeometryError: see above.
    """
    for run in geometry.layers:
        if run.piece_nbytes != run.page_nbytes:
            raise GeometryError(
                f"pages of layout {geometry.layout} are not runs of memory; choose a layout in which blocks are "
                f"outside of heads and tokens, or {otherwise}."
            )
        if any(size % WORD_NBYTES for size in (run.content_nbytes, run.offset, run.layer_stride, run.block_stride)):
            raise GeometryError(
                f"pages of {run.content_nbytes} bytes a head and token, {run.block_stride} from block to block, do not "
                f"consist of words of {WORD_NBYTES} bytes; {otherwise}."
            )


def require_verifiable(legs: tuple[tuple[Leg, ...], ...]) -> None:
    """Refuse legs whose units are parts of what was summed, or whose words have no keys.

    Raises:
        GeometryError: a unit has fewer states than a granule of the source, or a page is spread over memory.
    """
    for leg in (leg for group in legs for leg in group):
        if not leg.plan.source.is_run:
            raise GeometryError(
                "pages of the source are not runs of memory and cannot be summed; choose another layout, or do not "
                "verify"
            )
        if not leg.plan.can_verify:
            raise GeometryError(
                f"pages of {leg.plan.source.num_states} states are summed in granules of "
                f"{granule_states(leg.plan.source.num_states)}, but the peer takes {leg.plan.unit}; use blocks of a "
                "multiple of the granule, or do not verify"
            )


def _check_tokens(source: CacheGeometry, destination: CacheGeometry) -> None:
    for left, right in zip(_each_run(source), _each_run(destination), strict=True):
        if left.block_size * right.num_states != right.block_size * left.num_states:
            raise GeometryError(
                f"a state of KV-cache group {left.group} stands for {left.block_size / left.num_states:g} tokens in "
                f"the source and {right.block_size / right.num_states:g} in the destination"
            )


def _each_run(geometry: CacheGeometry) -> Iterator[LayerRun]:
    for run in geometry.layers:
        for _ in range(run.count):
            yield run
