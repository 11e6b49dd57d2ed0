"""What the kernels are compiled for: the numbers of a plan as their constants. Needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass

from pdkv_connectors.ipc.hashing import LANES, WORD_NBYTES, granule_states
from pdkv_connectors.ipc.plan import PagePlan, PageShape

Constants = dict[str, int | bool]

MIN_TILE = 128
"""The smallest tile in words."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a copy is cut: each program has up to `tile` words under way at once, in `warps` warps."""

    tile: int
    warps: int


WHOLE_DEVICE = Tiling(512, 4)
"""For a copy of as many programs as there are items: on an H200 many small ones copy a little more than larger ones."""

BESIDE_OTHERS = Tiling(4096, 16)
"""For a copy of few programs beside decoding. A decode step of an H200 loses to it what its bytes take of the memory's
bandwidth, and loses more the longer it lasts: so each program has many bytes under way."""


def copy_constants(
    plan: PagePlan, layers: int, align: int, *, verify: bool, tiling: Tiling = WHOLE_DEVICE
) -> Constants:
    """The constants of `kernels.copy_pages`.

    Args:
        layers: how many layers have pages of this plan.
        align: of :meth:`PagePlan.alignment` over the addresses of all layers.
    """
    source, target = plan.source, plan.destination
    target_word = WORD_NBYTES // 2 if plan.quantize else WORD_NBYTES
    outside = source.is_heads_outside
    inner = plan.unit if outside else plan.heads.count
    source_strides = _ordered(source, outside, WORD_NBYTES)
    target_strides = _ordered(target, outside, target_word)
    first_word = plan.first_source_byte // WORD_NBYTES
    slot_words = plan.unit * source.state_stride // WORD_NBYTES
    tile = max(min(tiling.tile, 1 << max(plan.unit_words - 1, 0).bit_length()), MIN_TILE)
    granules = plan.unit // granule_states(source.num_states)
    sums = plan.heads.count * granules if verify else 1
    runs = plan.is_run(source)
    key_run = min(tile, LANES)
    aligned = first_word % key_run == 0 and (plan.source_units == 1 or slot_words % key_run == 0)
    return {
        "LAYERS": layers,
        "TOTAL": plan.unit_words,
        "INNER": inner,
        "WORDS": source.content_bytes // WORD_NBYTES,
        "SOURCE_OUTER": source_strides[0],
        "SOURCE_INNER": source_strides[1],
        "SOURCE_SLOT": slot_words,
        "SOURCE_UNITS": plan.source_units,
        "SOURCE_BLOCK": source.block_stride // WORD_NBYTES,
        "TARGET_OUTER": target_strides[0],
        "TARGET_INNER": target_strides[1],
        "TARGET_SLOT": plan.unit * target.state_stride // target_word,
        "TARGET_UNITS": plan.destination_units,
        "TARGET_BLOCK": target.block_stride // target_word,
        "SOURCE_IS_RUN": runs,
        "TARGET_IS_RUN": plan.is_run_in_source_order,
        "FIRST_WORD": first_word,
        "KEYS_ARE_RUNS": runs and aligned,
        "LANES": LANES,
        "TILE": tile,
        "ALIGN": align,
        "VERIFY": verify,
        "SUM_BLOCK": source.sums,
        "SUM_HEAD": source.granules,
        "SUM_SLOT": max(granules, 1),
        "SUMS": sums,
        "SUMS_POWER": 1 << max(sums - 1, 0).bit_length(),
        "QUANTIZE": plan.quantize,
        "K_WORDS": source.content_bytes // WORD_NBYTES // 2,
    }


def copy_warps(constants: Constants, tiling: Tiling) -> int:
    """Warps for these constants: fewer where an item has too few words to give each thread two."""
    return min(tiling.warps, max(constants["TILE"] // 64, 1))


def sum_constants(shape: PageShape, layers: int, align: int) -> Constants:
    """The constants of `kernels.sum_pages`."""
    size = granule_states(shape.num_states)
    words = size * shape.content_bytes // WORD_NBYTES
    return {
        "LAYERS": layers,
        "HEADS": shape.num_heads,
        "GRANULES": shape.granules,
        "STATES": size,
        "WORDS": shape.content_bytes // WORD_NBYTES,
        "HEAD_STRIDE": shape.head_stride // WORD_NBYTES,
        "STATE_STRIDE": shape.state_stride // WORD_NBYTES,
        "BLOCK_STRIDE": shape.block_stride // WORD_NBYTES,
        "SUM_BLOCK": shape.sums,
        "LANES": LANES,
        "TILE": max(min(LANES, 1 << max(words - 1, 0).bit_length()), MIN_TILE),
        "ALIGN": align,
    }


def _ordered(shape: PageShape, heads_outside: bool, word_nbytes: int) -> tuple[int, int]:
    """Strides in words of the outer and the inner of heads and states, in the order of the source."""
    strides = (shape.head_stride, shape.state_stride) if heads_outside else (shape.state_stride, shape.head_stride)
    return strides[0] // word_nbytes, strides[1] // word_nbytes
