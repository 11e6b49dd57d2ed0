"""Whether what a peer says of its cache fits the memory that it handed over. D would die at an address without memory.

An honest peer of the same version never fails here; one whose cache was grown between the two, or of another build,
may.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from pdkv.errors import ProtocolError
from pdkv.memory import ImportedMemory
from pdkv.transfer.geometry import CacheGeometry, LayerRun
from pdkv_connectors.ipc.legs import sums_nbytes
from pdkv_connectors.ipc.route import BOARD, CACHE, SUMS


class Ranges:
    """Bytes ``begin..begin+nbytes-1`` of each of some ranges; neighbours count as one."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, nbytes in sorted(ranges):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], begin + nbytes)
            else:
                self._begins.append(begin)
                self._ends.append(begin + nbytes)

    def cover(self, begin: int, end: int) -> bool:
        """Whether each byte of ``begin..end-1`` is in one."""
        at = bisect_right(self._begins, begin) - 1
        return at >= 0 and end <= self._ends[at]


def require_backed(geometry: CacheGeometry, memories: Mapping[int, ImportedMemory], *, verify: bool) -> None:
    """Refuse a geometry of which something is not in the memories.

    Raises:
        ProtocolError: a memory was not handed over; or extents, pages, sums or the board's marks are not all in it.
    """
    mapped = {
        number: Ranges((piece.offset, piece.nbytes) for piece in memory.pieces) for number, memory in memories.items()
    }
    wanted = {CACHE: 1, BOARD: geometry.num_blocks} | ({SUMS: sums_nbytes(geometry)} if verify else {})
    for number, nbytes in wanted.items():
        if number not in mapped or (number != CACHE and not mapped[number].cover(0, nbytes)):
            raise ProtocolError(
                f"a peer's cache of {geometry.num_blocks} blocks needs {nbytes} bytes of memory {number}, which it did "
                "not hand over; handshake again."
            )
    extents = Ranges(geometry.extents())
    if not all(mapped[CACHE].cover(extent.offset, extent.offset + extent.nbytes) for extent in geometry.extents()):
        raise ProtocolError("a peer's cache has extents where it handed over no memory; handshake again.")
    for run in geometry.layers:
        for layer in range(run.count):
            begin = run.offset + layer * run.layer_stride
            if not extents.cover(begin, begin + _span(run, geometry.num_blocks)):
                raise ProtocolError("a peer's cache has blocks outside of its extents; handshake again.")


def _span(run: LayerRun, num_blocks: int) -> int:
    """Bytes from the first of a layer's first block to the last of its last one."""
    heads, states = (run.num_heads - 1) * run.head_stride, (run.num_states - 1) * run.state_stride
    return (num_blocks - 1) * run.block_stride + heads + states + run.content_nbytes
