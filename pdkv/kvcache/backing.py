"""The physical side of a cache: bytes behind the beginnings of segments, and the chunks that they come in.

Knows nothing of blocks. Sizes are in bytes. `needs` has one size per segment, each a multiple of the granule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdkv.errors import OutOfMemoryError
from pdkv.kvcache.placement import Segment
from pdkv.memory.reservation import Piece, ReleaseReport, Reservation

if TYPE_CHECKING:
    import torch

    from pdkv.memory.driver import MappedChunk, MemoryDriver


class SegmentBacking:
    """Memory behind `segments`, each of which begins on a granule of a new reservation of `nbytes` bytes."""

    def __init__(self, driver: MemoryDriver, segments: Sequence[Segment], nbytes: int) -> None:
        self._reservation = Reservation(driver, nbytes)
        self._offsets = [segment.offset for segment in segments]
        # Kept so that a commit with nothing to do takes microseconds. What others are told about chunks comes from the
        # driver.
        self._backed = [0] * len(segments)
        self._pieces = [0] * len(segments)
        self._epoch = self._reservation.epoch
        #: Rises by one with every operation that replaced mapped memory or took it away, one that failed included.
        self.generation = 0

    @property
    def address(self) -> int:
        """First address of the reservation."""
        return self._reservation.address

    @property
    def physical_bytes(self) -> int:
        """Physical memory held now."""
        return self._reservation.physical_bytes

    @property
    def backed(self) -> Sequence[int]:
        """Bytes behind each segment."""
        return self._backed

    @property
    def is_fragmented(self) -> bool:
        """Whether a segment lies in more than one chunk. Asks no driver."""
        return max(self._pieces) > 1

    def would_leave_pieces(self, needs: Sequence[int]) -> bool:
        """Whether growing to `needs` would leave a segment in more than one chunk. Asks no driver."""
        return self.is_fragmented or any(0 < backed < need for backed, need in zip(self._backed, needs, strict=True))

    def grow(self, needs: Sequence[int]) -> None:
        """Add what is missing to `needs`, zeroed; all or nothing. What is mapped stays as it is."""
        missing = {
            segment: Piece(self._offsets[segment] + backed, need - backed)
            for segment, (backed, need) in enumerate(zip(self._backed, needs, strict=True))
            if need > backed
        }
        if not missing:
            return
        try:
            self._reservation.add(list(missing.values()))
        except BaseException:
            self._look_up()
            raise
        # Counted on, not looked up: a cache that grows in small steps has thousands of pieces, which none should visit.
        for segment, piece in missing.items():
            self._backed[segment] += piece.nbytes
            self._pieces[segment] += 1

    def replace(self, needs: Sequence[int]) -> None:
        """Back every segment by one new chunk, zeroed.

        Raises:
            OutOfMemoryError: the message says whether the contents were lost; if so, :attr:`generation` has risen.
        """
        pieces = [Piece(offset, need) for offset, need in zip(self._offsets, needs, strict=True) if need]
        with self._changing():
            self._reservation.replace(pieces)

    def replace_preserving(self, needs: Sequence[int]) -> None:
        """Back every segment by one chunk, one segment after the other, the common prefix copied, the rest zero.

        Raises:
            OutOfMemoryError: nothing was lost. Where memory ran out on the way, although it was there at the start,
                some segments have their new chunk already, and :attr:`generation` has risen.
        """
        todo = [
            (offset, backed, need)
            for offset, backed, pieces, need in zip(self._offsets, self._backed, self._pieces, needs, strict=True)
            if pieces > 1 or backed != need
        ]
        self._require_spare([(backed, need) for _, backed, need in todo])
        with self._changing():
            for offset, backed, need in todo:
                self._reservation.replace_preserving(Piece(offset, max(backed, need)), Piece(offset, need))

    def release(self) -> ReleaseReport:
        """Give all memory back; the addresses stay."""
        with self._changing():
            return self._reservation.release()

    def restore(self, needs: Sequence[int]) -> None:
        """After :meth:`release`: back every segment by one new chunk, zeroed; all or nothing."""
        if any(self._backed):  # the release failed half-way; what it left behind is not zero
            self.replace(needs)
        else:
            self.grow(needs)

    def zero_between(self, begins: Sequence[int], ends: Sequence[int]) -> None:
        """Zero bytes ``begin..end-1`` of each segment, as far as they are mapped."""
        ranges = [
            (self.address + offset + begin, min(end, backed) - begin)
            for offset, begin, end, backed in zip(self._offsets, begins, ends, self._backed, strict=True)
            if begin < min(end, backed)
        ]
        if ranges:
            self._reservation.driver.zero_all(ranges)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """int8 over a range of the reservation, its storage being exactly that range; touches no page."""
        return self._reservation.tensor(offset, nbytes)

    def chunks(self) -> list[list[MappedChunk]]:
        """The driver's chunks, by segment."""
        found: list[list[MappedChunk]] = [[] for _ in self._offsets]
        for chunk in self._reservation.chunks():
            found[self._segment_at(chunk.address - self.address)].append(chunk)
        return found

    def export_fds(self) -> tuple[tuple[Piece, int], ...]:
        """See :meth:`Reservation.export_fds`."""
        return self._reservation.export_fds()

    def close(self) -> None:
        """Give memory and, once no view is alive, addresses back. Idempotent."""
        self._reservation.close()

    def _require_spare(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Refuse before anything changes if the old and the new chunk of some segment do not fit beside the rest."""
        grown = spare = 0
        for backed, need in pairs:
            spare = max(spare, grown + need)
            grown += need - backed
        free = self._reservation.driver.memory_info().free
        if spare > free:
            raise OutOfMemoryError(
                f"replacing the KV cache's memory and keeping its contents takes {spare} spare bytes for a while, but "
                f"{free} are free; nothing was changed. Free some memory, or commit without preserve.",
                wanted=spare,
                free=free,
            )

    def _segment_at(self, offset: int) -> int:
        return bisect_right(self._offsets, offset) - 1

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Look up what is backed when the operation inside has ended, however it ended."""
        try:
            yield
        finally:
            self._look_up()

    def _look_up(self) -> None:
        """What is backed by how many chunks, and whether memory was replaced."""
        if self._reservation.epoch != self._epoch:
            self._epoch = self._reservation.epoch
            self.generation += 1
        self._backed = [0] * len(self._offsets)
        self._pieces = [0] * len(self._offsets)
        for piece in self._reservation.pieces:
            segment = self._segment_at(piece.offset)
            self._backed[segment] += piece.nbytes
            self._pieces[segment] += 1
