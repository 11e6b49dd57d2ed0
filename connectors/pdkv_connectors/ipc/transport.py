"""The ipc transport: engines of one machine that map each other's memory.

P hands descriptors of its chunks to D over a Unix socket; D maps them, for reading only, into one range of its own, and
copies all blocks and layers of a request at once: by one kernel launch on CUDA, by compiled loops on the host. On the
way block sizes, layouts, numbers of heads and bf16 are converted, and every page is checked against P's sums.

D copies only what P has finished. P says so on a board in shared memory, after :meth:`IpcTransport.offer`; where a
block is not on it, D asks, and P synchronises its device, sums the blocks and answers: slower, and always right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdkv.errors import GeometryError, TransportError
from pdkv.memory import MemoryDriver, open_driver
from pdkv.transfer.base import PostedTransfer, TransportBase
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection, require_pairs
from pdkv.transfer.connecting import Steps
from pdkv.transfer.counters import Counters
from pdkv.transfer.first_error import FirstError
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.shards import HeadSlice
from pdkv_connectors.ipc import wire
from pdkv_connectors.ipc.believed import require_backed
from pdkv_connectors.ipc.columns import BlockColumns, Ids, are_within, columns_of
from pdkv_connectors.ipc.legs import legs_between, require_verifiable, require_words
from pdkv_connectors.ipc.link import open_link
from pdkv_connectors.ipc.loop import Loop
from pdkv_connectors.ipc.offers import Offers, require_agreed
from pdkv_connectors.ipc.owner import GrantedMemory, Owner
from pdkv_connectors.ipc.route import Between, CudaRoute, HostRoute, Route
from pdkv_connectors.ipc.transfers import IpcTransfer
from pdkv_connectors.native import find_kernels

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv_connectors.ipc.cuda_mover import CudaMover
    from pdkv_connectors.native import Kernels

logger = logging.getLogger(__name__)

THROTTLED_PROGRAMS = 64
"""Programs of a copy that runs beside decoding; docs/ipc.md says what a decode step of an H200 (132 multiprocessors)
loses to so many. A copy that takes the whole device stops decoding until it ends."""

DROP_TIMEOUT_S = 5.0
"""How long peers have to let go of memory that is taken back, unless told otherwise."""

_PAGE_NBYTES = 4096


class IpcTransport(TransportBase[Route]):
    """See the module's docstring. It reads only: whoever wants blocks fetches them.

    Args:
        verify: check every page against the owner's sums before its transfer counts as done; and keep sums of the own
            cache for others to check. A peer that keeps none is refused then.
        is_decoding: whether decode steps run now, which a copy then leaves most of the device to.
        programs: how many programs such a copy has.
        fp8_scales: (scale of K, scale of V) of each layer of this cache. Where they are given, and this cache is fp8, a
            peer's bf16 becomes fp8 on the way: ``value / scale``, saturated at 448, NaN as 0x7f.
        drop_timeout_s: how long peers have to let go of memory that is taken back.
        compiled: whether the host's kernels are used, where llvmlite can compile them; without them memoryview slices
            and numpy do the same, more slowly.
    """

    name = "ipc"
    can_write = False
    converts = True
    #: P closes its link before it takes memory back, and each step of a READ looks whether that is open. Bytes are
    #: moved by this side alone, on the host within :meth:`IpcTransfer.poll`; what waits for P's word that blocks are
    #: complete moves nothing, and can be abandoned.
    fences = True

    def __init__(
        self,
        *,
        verify: bool = True,
        is_decoding: Callable[[], bool] = lambda: False,
        programs: int = THROTTLED_PROGRAMS,
        fp8_scales: Sequence[tuple[float, float]] | None = None,
        drop_timeout_s: float = DROP_TIMEOUT_S,
        compiled: bool = True,
    ) -> None:
        super().__init__()
        self.verifies = verify
        self._is_decoding = is_decoding
        self._programs = programs
        self._fp8_scales = fp8_scales
        self._drop_timeout_s = drop_timeout_s
        self._compiled = compiled
        self._kernels: Kernels | None = None
        self._loop: Loop | None = None
        self._owner: Owner | None = None
        self._offers: Offers | None = None
        self._movers: list[CudaMover] = []  # one for copies, one for sums, which another thread may ask for
        self._pages: MemoryDriver | None = None

    # What P does beside the contract.

    def offer(self, block_ids: Sequence[int] | Ids, *, group: int | None = None, after: int | None = None) -> None:
        """Say that blocks are complete, so that peers can read them without asking.

        They are summed, as blocks of `group` or of every group; on CUDA that happens behind the event `after` (an
        address, as ``torch.cuda.Event.cuda_event``), and the blocks are announced by a later :meth:`progress`. Offer
        blocks again when they have been written again.

        Raises:
            StateError: no cache is registered.
            ProtocolError: there is no such block.
        """
        self._require_registered()
        if self._offers is not None:
            self._offers.offer(block_ids, group=group, after=after)

    def withdraw(self, block_ids: Sequence[int] | Ids) -> None:
        """Say that blocks are about to be written. Who asks for them all the same gets what they hold then."""
        self.require_process()
        if self._offers is not None:
            self._offers.withdraw(block_ids)

    @property
    def num_offers_pending(self) -> int:
        """Offers whose blocks have not been announced yet."""
        return self._offers.num_pending if self._offers is not None else 0

    def progress(self) -> None:
        """Announce what was offered and has been summed by now."""
        self.require_process()
        if self._offers is not None:
            self._offers.progress()

    @property
    def needs_progress(self) -> bool:
        """While there are offers to be announced; peers need nothing else of this side."""
        return self.num_offers_pending > 0

    # The contract.

    def describe_state(self) -> dict[str, Any]:
        found = {"verify": self.verifies, "holders": self._owner.num_peers if self._owner is not None else 0}
        below = "triton" if self._movers else "memoryview" if self._kernels is None else "llvm"
        return {**super().describe_state(), **found, "below": below}

    def close(self, *, timeout_s: float = 5.0) -> None:
        with FirstError() as errors:
            errors.attempt("end what the ipc transport holds", partial(super().close, timeout_s=timeout_s))
            if self._loop is not None:
                errors.attempt("end the ipc thread", partial(self._loop.stop, timeout_s))
            if errors.error is None:  # else the thread, or the next close(), still needs them
                self._free()

    def _free(self) -> None:
        for mover in self._movers:
            mover.close()
        self._movers = []
        if self._pages is not None:
            self._pages.close()

    def _do_register(self, cache: GrowableKVCache, geometry: CacheGeometry, engine: EngineRef) -> None:
        require_words(geometry, "choose another transport")
        if cache.driver.name == "cuda" and not self._movers:
            from pdkv_connectors.ipc.cuda_mover import CudaMover

            self._movers = [CudaMover(cache.driver.device_id) for _ in range(2)]
        elif cache.driver.name == "host" and self._compiled:
            self._kernels = find_kernels()
        try:
            self._loop = self._loop or Loop()
            self._pages = self._pages or open_driver("host", granule=_PAGE_NBYTES)
            self._owner = self._own(cache, geometry, engine, self._loop)
        except OSError as error:
            raise TransportError(f"the ipc transport cannot listen to peers: {error}; see `ulimit -n`.") from error

    def _own(self, cache: GrowableKVCache, geometry: CacheGeometry, engine: EngineRef, loop: Loop) -> Owner:
        memories: dict[int, GrantedMemory] = {}
        try:
            mover = self._movers[1] if self._movers else None
            offers = self._offers = Offers(cache, geometry, mover, keeps_sums=self.verifies, kernels=self._kernels)
            memories[0] = GrantedMemory(cache.bytes_reserved, cache.export_fds())
            if offers.sums is not None:
                memories[1] = offers.sums.export()
            memories[2] = offers.board.export()
            return Owner(loop, engine, memories, offers.make_ready, Counters(self._count))
        except BaseException:
            for memory in memories.values():
                memory.close()
            self._close_offers()
            raise

    def _do_unregister(self) -> None:
        if self._owner is not None:
            holding = self._owner.drop_all(self._drop_timeout_s)
            if holding:
                self.counts["drops_unacknowledged"] += len(holding)
                logger.warning("%s still hold this engine's memory, which is free once they let go or end.", holding)
        self._owner = None
        self._close_offers()

    def _do_describe(self) -> bytes:
        if self._owner is None:
            raise TransportError("the ipc transport does not listen; register() first.")
        return wire.write_address(self._owner.address)

    def _do_connect(
        self, peer: EngineRef, geometry: CacheGeometry, own: bytes, timeout_s: float, heads: HeadSlice | None
    ) -> Steps[Route]:
        me, ours = self._require_registered()
        cache = self.cache
        if cache is None or self._loop is None or self._pages is None:
            raise TransportError("the ipc transport has no cache; register() first.")
        if geometry.driver != ours.driver or ours.driver not in ("host", "cuda"):
            raise GeometryError(
                f"the peer's cache is {geometry.driver} memory and this one {ours.driver}; ipc needs both alike."
            )
        address = wire.read_address(own)
        require_agreed(self.verifies, address.verifies)
        scales = self._fp8_scales
        legs = legs_between(geometry, ours, heads, quantize=self._quantizes(geometry, ours))
        if self._movers and any(leg.plan.cuts_columns for group in legs for leg in group):
            raise GeometryError(
                "pages that hold K by column become blocks of another size on the host only; use equal ones"
            )
        if self.verifies:
            require_verifiable(legs)
        driver = self._pages if ours.driver == "host" else cache.driver
        link = yield from open_link(address, peer, me, {0: driver, 1: driver, 2: self._pages}, timeout_s)
        between = Between(link, geometry, ours, legs, scales, self.verifies)
        try:
            require_backed(geometry, link.memories, verify=self.verifies)
            route = (
                CudaRoute(between, cache.address, self._movers[0])
                if self._movers
                else HostRoute(between, cache, driver, self._kernels)
            )
        except BaseException:
            link.close()
            raise
        link.serve(self._loop, route.drain)
        return route

    def _do_disconnect(self, connection: Connection[Route]) -> None:
        connection.link.close()

    def _do_stop(self, timeout_s: float) -> None:
        for transfer in list(self._running):
            if isinstance(transfer, IpcTransfer):
                transfer.cancel()
        for mover in self._movers:
            mover.drain()
        self._poll_running()

    def _check_pairs(
        self,
        connection: Connection[Route],
        pairs: Sequence[BlockPair],
        source: CacheGeometry,
        destination: CacheGeometry,
    ) -> None:
        route = connection.link
        try:
            columns = columns_of(pairs)
        except OverflowError:
            columns = []
        if are_within(columns, len(route.legs), route.source_units, route.destination_units):
            return
        parts: Sequence[Sequence[BlockPair]] = columns or [pairs]
        for part in parts:
            group = part.group if isinstance(part, BlockColumns) and part.group < len(route.legs) else 0
            require_pairs(
                list(part),
                replace(source, num_blocks=route.source_units[group]),
                replace(destination, num_blocks=route.destination_units[group]),
            )
        require_pairs(pairs, source, destination)

    def _do_post(self, connection: Connection[Route], pairs: Sequence[BlockPair], *, reads: bool) -> PostedTransfer:
        connection.link.link.require_open()
        programs = self._programs if self._movers and self._is_decoding() else None
        transfer = IpcTransfer(self, connection, columns_of(pairs), programs)
        transfer.begin()
        return transfer

    # Parts.

    def _count(self, name: str, amount: int) -> None:
        self.counts[name] += amount

    def _quantizes(self, theirs: CacheGeometry, ours: CacheGeometry) -> bool:
        """Whether bf16 there and fp8 here is meant to be."""
        if self._fp8_scales is None:
            return False
        if len(self._fp8_scales) != ours.num_layers:
            raise GeometryError(f"{len(self._fp8_scales)} pairs of fp8 scales were given for {ours.num_layers} layers.")
        return ours.layers[0].dtype == "float8_e4m3fn" != theirs.layers[0].dtype

    def _close_offers(self) -> None:
        if self._offers is not None:
            self._offers.close()
        self._offers = None
