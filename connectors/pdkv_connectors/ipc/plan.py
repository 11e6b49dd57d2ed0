"""What a copy between two caches does to each page, worked out once for a pair of layouts.

Pages are copied in *units*: so many states (tokens) as the smaller of both blocks has. A larger block consists of
several units, and each unit of the source goes to one of the destination; so blocks of 16 tokens become blocks of 64,
and back. Within a unit heads and states may be in another order on the other side (HNC, NHC), heads may be a slice of
those that the other side has (unequal tensor parallelism), and bf16 may become fp8.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from pdkv.errors import GeometryError
from pdkv.kvcache.specs import Interior, item_bytes
from pdkv.transfer.shards import HeadSlice
from pdkv_connectors.ipc.hashing import WORD_NBYTES, granule_states

_FP8 = "float8_e4m3fn"
_MAX_VECTOR_NBYTES = 16  # the widest access of a GPU's thread


@dataclass(frozen=True, slots=True)
class PageShape:
    """How the pages of some layers lie on one side. Sizes and strides in bytes.

    Attributes:
        num_heads, num_states, content_bytes: H, N, C of a page.
        head_stride, state_stride: within a page, which is dense.
        block_stride: from one block's page to the next block's.
        dtype: element type as torch calls it; None for bytes.
        interior: how a head's bytes lie; see :data:`pdkv.kvcache.Interior`.
    """

    num_heads: int
    num_states: int
    content_bytes: int
    head_stride: int
    state_stride: int
    block_stride: int
    dtype: str | None = None
    interior: Interior = "tokens"

    @property
    def nbytes(self) -> int:
        """Bytes of a page without padding."""
        return self.num_heads * self.num_states * self.content_bytes

    @property
    def is_heads_outside(self) -> bool:
        """Whether a page is HNC and not NHC; with one head, or one state, both are the same."""
        return self.num_heads == 1 or self.head_stride >= self.state_stride

    @property
    def is_run(self) -> bool:
        """Whether a page is one run of memory; a word's key is known by its place in it."""
        last = (self.num_heads - 1) * self.head_stride + (self.num_states - 1) * self.state_stride
        return last + self.content_bytes == self.nbytes

    @property
    def granules(self) -> int:
        """Granules that each head of a page is summed in."""
        return self.num_states // granule_states(self.num_states)

    @property
    def sums(self) -> int:
        """Sums of one page: ``[H, N / G]``."""
        return self.num_heads * self.granules


@dataclass(frozen=True, slots=True)
class PagePlan:
    """One kind of copy. Strides in bytes of the side that they belong to.

    Attributes:
        source, destination: the pages.
        heads: which of them.
        unit: states in a unit.
        quantize: whether bf16 becomes fp8 on the way.
    """

    source: PageShape
    destination: PageShape
    heads: HeadSlice
    unit: int
    quantize: bool

    @property
    def source_units(self) -> int:
        """Units in a block of the source."""
        return self.source.num_states // self.unit

    @property
    def destination_units(self) -> int:
        """Units in a block of the destination."""
        return self.destination.num_states // self.unit

    @property
    def unit_words(self) -> int:
        """64-bit words of the source in one unit of one layer."""
        return self.heads.count * self.unit * self.source.content_bytes // WORD_NBYTES

    @property
    def unit_nbytes(self) -> int:
        """Bytes of the source in one unit of one layer."""
        return self.unit_words * WORD_NBYTES

    @property
    def cuts_columns(self) -> bool:
        """Whether units are parts of pages in which K lies by column: then their bytes are no runs."""
        return self.source.interior == "columns" and self.source.num_states != self.destination.num_states

    @property
    def takes_all_heads(self) -> bool:
        """Whether no head of either side is left out."""
        return self.source.num_heads == self.heads.count == self.destination.num_heads

    @property
    def is_run_in_source_order(self) -> bool:
        """Whether the destination takes a unit as one run, its words in the order that they have in the source."""
        single = self.heads.count == 1 or self.unit == 1
        same_order = single or self.source.is_heads_outside == self.destination.is_heads_outside
        return same_order and self.is_run(self.destination)

    def is_run(self, side: PageShape) -> bool:
        """Whether a unit of the slice is one run of memory on this side, `source` or `destination`."""
        if side.is_heads_outside:
            return self.heads.count == 1 or self.unit == side.num_states
        return self.unit == 1 or self.heads.count == side.num_heads

    @property
    def first_source_byte(self) -> int:
        """Where the slice begins in a page of the source."""
        return self.heads.source * self.source.head_stride

    @property
    def first_destination_byte(self) -> int:
        """Where the slice begins in a page of the destination."""
        return self.heads.destination * self.destination.head_stride

    @property
    def can_verify(self) -> bool:
        """Whether the source's granules divide a unit, so that a unit can be checked by itself; of pages of columns
        the whole is checked."""
        return self.cuts_columns or self.unit % granule_states(self.source.num_states) == 0

    def alignment(self, *addresses: int) -> int:
        """The widest access in bytes, at most 16, to which everything is aligned, the addresses of pages included."""
        sides = (self.source, self.destination)
        strides = [stride for side in sides for stride in (side.head_stride, side.state_stride, side.block_stride)]
        return gcd(_MAX_VECTOR_NBYTES, *strides, *addresses)


def plan_pages(
    source: PageShape, destination: PageShape, heads: HeadSlice | None = None, *, quantize: bool = False
) -> PagePlan:
    """How pages of `source` become pages of `destination`.

    Args:
        heads: which heads; all of them unless told.
        quantize: write bf16 as fp8 (e4m3).

    Raises:
        GeometryError: they cannot; the message names the first difference.
    """
    heads = heads or HeadSlice(source.num_heads)
    _check_heads(source, destination, heads)
    _check_content(source, destination, quantize)
    small, large = sorted((source.num_states, destination.num_states))
    if large % small:
        raise GeometryError(
            f"blocks of {source.num_states} and {destination.num_states} states: one must divide the other"
        )
    for name, side in (("source", source), ("destination", destination)):
        inner, outer = sorted((side.head_stride, side.state_stride))
        count = side.num_heads if side.head_stride < side.state_stride else side.num_states
        dense = side.num_heads == 1 or side.num_states == 1 or (inner, outer) == (side.content_bytes, inner * count)
        if not dense:
            raise GeometryError(f"pages of the {name} are not dense; choose a layout whose pages are runs of memory")
    _check_interiors(source, destination, heads, quantize)
    return PagePlan(source, destination, heads, small, quantize)


def _check_interiors(source: PageShape, destination: PageShape, heads: HeadSlice, quantize: bool) -> None:
    """Refuse to take apart what is not laid out as the shape says."""
    interior = source.interior
    if interior != destination.interior:
        raise GeometryError(
            f"pages hold their heads by {interior} in the source, by {destination.interior} in the other"
        )
    if interior == "tokens":
        return
    if quantize or not (source.is_heads_outside and destination.is_heads_outside):
        raise GeometryError(f"pages that hold their heads by {interior} are converted neither in dtype nor in order")
    if interior == "opaque" and not source.num_heads == heads.count == destination.num_heads:
        raise GeometryError("what is in a page is not known, so that no heads can be taken out of it; use equal ranks")
    if (
        interior == "columns"
        and source.dtype is not None
        and source.content_bytes % (2 * item_bytes(source.dtype)) == 0
    ):
        return
    if source.num_states != destination.num_states:
        raise GeometryError(
            f"blocks of {source.num_states} and {destination.num_states} states, which hold heads by {interior}; use "
            "blocks of one size"
        )


def _check_heads(source: PageShape, destination: PageShape, heads: HeadSlice) -> None:
    for name, side, first in (("source", source, heads.source), ("destination", destination, heads.destination)):
        if heads.count < 1 or first < 0 or first + heads.count > side.num_heads:
            raise GeometryError(
                f"heads {first} to {first + heads.count - 1} are wanted of {side.num_heads} of the {name}"
            )


def _check_content(source: PageShape, destination: PageShape, quantize: bool) -> None:
    if quantize:
        if (source.dtype, destination.dtype) != ("bfloat16", _FP8):
            raise GeometryError(f"only bfloat16 becomes {_FP8} on the way, not {source.dtype} {destination.dtype}")
    elif source.dtype != destination.dtype:
        raise GeometryError(f"the source holds {source.dtype} and the destination {destination.dtype}")
    if source.content_bytes != destination.content_bytes * (2 if quantize else 1):
        raise GeometryError(
            f"a head keeps {source.content_bytes} bytes of a token in the source and {destination.content_bytes} in "
            "the destination; both must run the same model"
        )
    if source.content_bytes % WORD_NBYTES:
        raise GeometryError(f"the content of {source.content_bytes} bytes is no multiple of {WORD_NBYTES}")
