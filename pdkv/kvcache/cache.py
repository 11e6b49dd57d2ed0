"""A KV cache whose addresses are reserved at once and whose memory comes and goes.

The address range of the whole capacity is reserved when the cache is built. Committing backs a prefix of blocks in
every segment. Addresses never change, so that views and captured graphs stay valid (I1). Whether memory was replaced,
and with it every registration made stale, is told by :attr:`GrowableKVCache.generation` (I3).

To be changed from one thread at a time. The read-only methods may be called from any thread between changes.
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pdkv.errors import DriverError, StateError
from pdkv.kvcache.backing import SegmentBacking
from pdkv.kvcache.config import KVCacheConfig
from pdkv.kvcache.extents import Chunk, Extent, find_extent, segment_extents, split_at_extents
from pdkv.kvcache.placement import Segment
from pdkv.kvcache.report import CommitReport
from pdkv.kvcache.views import all_views, segment_raws

if TYPE_CHECKING:
    import torch

    from pdkv.memory.driver import MemoryDriver
    from pdkv.memory.reservation import Piece, ReleaseReport


class GrowableKVCache:
    """A KV cache over one reservation; see the module's docstring.

    Args:
        config: the placements for the whole capacity; :attr:`config` is the same with segments padded to granules.
        driver: where memory comes from. It must outlive the cache and is not closed by it.

    Raises:
        LayoutError: the placements cannot be padded to granules.
        DriverError: the address range could not be reserved.
    """

    def __init__(self, config: KVCacheConfig, driver: MemoryDriver) -> None:
        self._driver = driver
        self._config = config.padded(driver.granule)
        self._segments = self._config.segments
        self._backing = SegmentBacking(driver, self._segments, self._config.size)
        self._committed = 0
        self._released_blocks: int | None = None
        self._views: dict[str, torch.Tensor] | None = None
        self._closed = False

    @property
    def config(self) -> KVCacheConfig:
        """The placements of the whole capacity, padded: what an engine must allocate by."""
        return self._config

    @property
    def driver(self) -> MemoryDriver:
        """Where the memory comes from."""
        return self._driver

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The ranges that are committed from their beginnings, offsets relative to :attr:`address`."""
        return self._segments

    @property
    def address(self) -> int:
        """First address of the reservation."""
        return self._backing.address

    @property
    def bytes_reserved(self) -> int:
        """Bytes of address space; equal to ``config.size``."""
        return self._config.size

    @property
    def capacity_blocks(self) -> int:
        """Blocks that can be committed at most."""
        return self._config.num_blocks

    @property
    def num_committed_blocks(self) -> int:
        """Blocks that are backed now; 0 while released."""
        return self._committed

    @property
    def generation(self) -> int:
        """Rises whenever physical memory behind committed blocks was replaced, with :meth:`release_physical` already.

        Compare for equality only.
        """
        return self._backing.generation

    @property
    def is_released(self) -> bool:
        """Whether :meth:`release_physical` was called and :meth:`recommit` was not yet."""
        return self._released_blocks is not None

    @property
    def physical_bytes(self) -> int:
        """Physical memory of the cache now, in bytes."""
        return self._backing.physical_bytes

    def physical_bytes_for(self, num_blocks: int) -> int:
        """Physical memory in bytes behind `num_blocks` blocks, each segment rounded up to granules.

        More than the capacity counts as the capacity, as in :meth:`commit`.
        """
        return self._config.physical_bytes_for(self._config.clamped(num_blocks), self._driver.granule)

    def blocks_within(self, nbytes: int) -> int:
        """The most blocks whose :meth:`physical_bytes_for` is at most `nbytes`; between 0 and the capacity."""
        return self._config.blocks_within(nbytes, self._driver.granule)

    def require_blocks_within(self, nbytes: int, minimum: int = 1) -> int:
        """:meth:`blocks_within`, if that is at least `minimum`.

        Raises:
            CapacityError: the budget is too small; the message says how many bytes would do.
        """
        return self._config.require_blocks_within(nbytes, self._driver.granule, minimum)

    def commit(
        self, num_blocks: int, *, defragment: bool = False, shrink: bool = False, preserve: bool = False
    ) -> CommitReport:
        """Back blocks ``0..num_blocks-1`` with memory; more than the capacity counts as the capacity.

        New blocks read as zero. Growing keeps contents and generation. Fewer blocks than are committed change nothing,
        unless `shrink` is set. Memory is replaced, contents are discarded and the generation rises where `shrink` finds
        more blocks committed, and where `defragment` would otherwise leave a segment in several chunks.

        Args:
            defragment: leave the committed prefix of each segment in one chunk (I4).
            shrink: give back the memory of blocks beyond `num_blocks`.
            preserve: where memory is replaced, carry contents over, one segment after the other; the generation rises
                all the same. It takes spare memory for one segment; without that nothing is changed.

        Raises:
            CapacityError: `num_blocks` is negative.
            LayoutError: a part of the blocks, in a layout that cannot grow.
            StateError: the cache is released or closed.
            OutOfMemoryError: there is not enough memory. The blocks that were committed still are (I7); where the
                message says that contents were lost, they read as zero and the generation has risen.
        """
        self._require_open()
        if self.is_released:
            raise StateError("the KV cache is released; call recommit() before commit().")
        target = self._config.clamped(num_blocks)
        if not shrink:
            target = max(target, self._committed)
        self._config.require_growable(target)
        before = self._committed
        if target == before and not (defragment and self._backing.is_fragmented):
            return self._report(before, self.generation, contents_kept=True)
        needs, generation = self._needs(target), self.generation
        remap = target < before or (defragment and self._backing.would_leave_pieces(needs))
        try:
            if remap and not (preserve and target):
                self._backing.replace(needs)
            else:
                self._zero_tails(target)
                (self._backing.replace_preserving if remap else self._backing.grow)(needs)
        except DriverError:
            self._committed = min(before, self._config.blocks_backed_by(self._backing.backed))
            raise
        self._committed = target
        return self._report(before, generation, contents_kept=not remap or preserve)

    def release_physical(self) -> ReleaseReport:
        """Give all memory back, keep addresses and views. A second call gives back what the first one could not.

        Reading or writing through a view is a fault until :meth:`recommit`. The generation rises. Where the driver
        fails, the cache counts as released all the same.
        """
        self._require_open()
        if self._released_blocks is None:
            self._released_blocks, self._committed = self._committed, 0
        return self._backing.release()

    def recommit(self) -> CommitReport:
        """Back the blocks that were committed before :meth:`release_physical`, zeroed, one chunk per segment.

        A failure leaves the cache released, and it can be tried again.

        Raises:
            StateError: the cache is not released, so that its contents would not be what a caller expects: zeros.
            OutOfMemoryError: there is not enough memory.
        """
        self._require_open()
        if self._released_blocks is None:
            raise StateError("the KV cache is not released; recommit() follows release_physical() only.")
        self._backing.restore(self._needs(self._released_blocks))
        self._committed, self._released_blocks = self._released_blocks, None
        return replace(self._report(0, self.generation, contents_kept=False), remapped=True)

    def raw_tensor(self) -> torch.Tensor:
        """int8 ``[bytes_reserved]`` over the reservation, committed or not, for engines that build their own views."""
        self._require_open()
        return self._backing.tensor(0, self.bytes_reserved)

    def views(self) -> dict[str, torch.Tensor]:
        """``{layer: [capacity_blocks, H, N, C]}`` over the reservation. Touch committed blocks only."""
        self._require_open()
        if self._views is None:
            self._views = all_views([self.raw_tensor()] * len(self._config.tensors), self._config)
        return dict(self._views)

    def committed_config(self) -> KVCacheConfig:
        """Placements that describe :meth:`committed_views`; see :meth:`KVCacheConfig.committed_placements`.

        Raises:
            StateError: nothing is committed.
        """
        self._require_committed()
        return self._config.committed(self._committed)

    def committed_raw(self) -> tuple[torch.Tensor, ...]:
        """One int8 tensor per tensor of :meth:`committed_config`; those of one segment share a storage.

        Each storage begins with its segment and spans ``num_committed_blocks * block_stride`` bytes: the committed
        blocks and not a byte more, even where the last granule reaches further.

        Raises:
            StateError: nothing is committed.
        """
        self._require_committed()
        return segment_raws(
            self._config.committed_placements(self._committed),
            lambda segment, nbytes: self._backing.tensor(self._segments[segment].offset, nbytes),
        )

    def committed_views(self) -> dict[str, torch.Tensor]:
        """``{layer: [num_committed_blocks, H, N, C]}`` at the addresses of :meth:`views`, over :meth:`committed_raw`.

        What stock connectors register, ``untyped_storage().data_ptr()`` and ``.nbytes()``, is then exactly the
        committed bytes of a segment. They go stale with the next change of the number of blocks.

        Raises:
            StateError: nothing is committed.
        """
        return all_views(self.committed_raw(), self.committed_config())

    def chunks(self, segment: int) -> tuple[Chunk, ...]:
        """The chunks behind a segment, offsets relative to the segment's first byte, as the driver reports them."""
        self._require_open()
        begin = self.address + self._segments[segment].offset
        return tuple(Chunk(chunk.address - begin, chunk.nbytes) for chunk in self._backing.chunks()[segment])

    def chunks_per_segment(self) -> int:
        """The largest number of chunks behind one segment, as the driver reports it; 0 where nothing is committed."""
        return 0 if self._closed else max(len(chunks) for chunks in self._backing.chunks())

    def extents(self) -> tuple[Extent, ...]:
        """All ranges that may be registered: the driver's chunks within committed prefixes, in address order.

        Empty while nothing is committed or the cache is released.
        """
        self._require_open()
        device_id = self._driver.device_id
        found: list[Extent] = []
        for number, (where, chunks) in enumerate(zip(self._segments, self._backing.chunks(), strict=True)):
            nbytes = self._config.prefix_bytes(where, self._committed)
            found += segment_extents(chunks, self.address + where.offset, nbytes, segment=number, device_id=device_id)
        return tuple(found)

    def export_fds(self) -> tuple[tuple[Piece, int], ...]:
        """A descriptor for each chunk, with its place relative to :attr:`address`; the caller owns and closes them.

        Raises:
            DriverError: the driver's chunks cannot be exported.
        """
        self._require_open()
        return self._backing.export_fds()

    def check_range(self, address: int, nbytes: int) -> Extent:
        """The extent that holds the range; ExtentError if none does. For many ranges take :meth:`extents` once."""
        return find_extent(self.extents(), address, nbytes)

    def split_range(self, address: int, nbytes: int) -> tuple[Extent, ...]:
        """The range in parts that cross no extent border (I6); ExtentError if a byte of it is not committed."""
        return split_at_extents(self.extents(), address, nbytes)

    def describe(self) -> dict[str, Any]:
        """State for logs and reports; plain values only. `bytes_committed` counts physical memory."""
        return {
            "capacity_blocks": self.capacity_blocks,
            "committed_blocks": self._committed,
            "bytes_reserved": self.bytes_reserved,
            "bytes_committed": self.physical_bytes,
            "segments": len(self._segments),
            "chunks_per_segment": self.chunks_per_segment(),
            "generation": self.generation,
            "released": self.is_released,
            "layout": self._config.layout.name,
            "granule": self._driver.granule,
            "driver": self._driver.describe(),
        }

    def close(self) -> None:
        """Give everything back. Idempotent. Views that are still alive must not be touched any more."""
        if self._closed:
            return
        self._views = None
        self._backing.close()
        self._committed, self._released_blocks = 0, None
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("the KV cache is closed; build a new one.")

    def _require_committed(self) -> None:
        self._require_open()
        if not self._committed:
            what = "released; call recommit() first" if self.is_released else "empty; commit at least one block first"
            raise StateError(f"the KV cache is {what}: it has no committed views.")

    def _needs(self, num_blocks: int) -> list[int]:
        return self._config.segment_bytes_for(num_blocks, self._driver.granule)

    def _zero_tails(self, target: int) -> None:
        """Zero the new blocks' part of the last granules, which are mapped already and may have been written (I2)."""
        if target > self._committed:
            begins = [self._config.prefix_bytes(where, self._committed) for where in self._segments]
            ends = [self._config.prefix_bytes(where, target) for where in self._segments]
            self._backing.zero_between(begins, ends)

    def _report(self, before: int, generation: int, *, contents_kept: bool) -> CommitReport:
        return CommitReport(
            blocks=self._committed,
            added_blocks=self._committed - before,
            remapped=self.generation != generation,
            contents_kept=contents_kept,
            generation=self.generation,
            physical_bytes=self.physical_bytes,
        )
