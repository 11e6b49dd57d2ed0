"""One side's sums: of blocks that it offered, for whoever reads them, and of blocks that have arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pdkv.errors import PdkvError, ProtocolError, StaleGenerationError, TransportError
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.checking import wire
from pdkv_connectors.ipc.legs import require_words
from pdkv_connectors.ipc.offers import Offers
from pdkv_connectors.native import find_kernels

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv.transfer.geometry import CacheGeometry
    from pdkv_connectors.ipc.cuda_mover import CudaMover
    from pdkv_connectors.ipc.sums import PageSums

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work that is cut into steps of a few milliseconds, and what it returns."""


class SumKeeper:
    """Of one registration. Sums lie in memory of the same kind as the cache, and are made by what makes those of ipc.

    Args:
        engine: this side, in the generation of its registration.
        counts: where failures are counted.

    Raises:
        GeometryError: the pages cannot be summed; the message says why.
        TransportError: nor can memory of this driver, or Triton is missing.
    """

    def __init__(
        self, cache: GrowableKVCache, geometry: CacheGeometry, engine: EngineRef, counts: Counter[str]
    ) -> None:
        require_summable(geometry)
        self.geometry = geometry
        self._engine = engine
        self._counts = counts
        self._mover: CudaMover | None = None
        if geometry.driver == "cuda":
            from pdkv_connectors.ipc.cuda_mover import CudaMover

            self._mover = CudaMover(cache.driver.device_id)
        try:
            kernels = find_kernels() if self._mover is None else None
            self._offers = Offers(cache, geometry, self._mover, keeps_sums=True, kernels=kernels)
        except BaseException:
            self._close_mover()
            raise

    def offer(self, block_ids: Sequence[int]) -> None:
        """As :meth:`pdkv.transfer.transport.Transport.offer`."""
        self._offers.offer(block_ids)

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """As :meth:`pdkv.transfer.transport.Transport.withdraw`."""
        self._offers.withdraw(block_ids)

    def own(self, group: int, blocks: wire.Blocks) -> Steps[wire.SumArray]:
        """What blocks of this side hash to: as they were offered; those that were not are summed now.

        Raises:
            ProtocolError: there is no such group or block.
            TransportError: the memory is being taken back.
        """
        self._require_blocks(group, blocks)
        self._offers.progress()
        if len(missing := self._offers.missing(blocks)):
            yield from self._offers.sum_now(group, missing)
        return self._table.of_pages(group, blocks)

    def arrived(self, group: int, blocks: wire.Blocks) -> Steps[wire.SumArray]:
        """What blocks hash to that a transfer has just written, whatever was known of them before. Raises as above."""
        self._require_blocks(group, blocks)
        self._offers.withdraw(blocks)
        yield from self._offers.sum_now(group, blocks)
        return self._table.of_pages(group, blocks)

    def answer(self, body: bytes) -> Steps[bytes]:
        """The answer to a peer's question. What is wrong with the question is the answer too."""
        try:
            question = wire.decode_question(body)
            if question.owner != self._engine:
                raise StaleGenerationError(
                    f"{question.owner.engine_id!r} in generation {question.owner.generation} was asked, this is "
                    f"{self._engine.engine_id!r} in {self._engine.generation}; handshake again"
                )
            blocks = wire.read_ids(question.blocks)
            if isinstance(question, wire.Wanted):
                sums = yield from self.own(question.group, blocks)
                return wire.encode(wire.Sums(wire.write_sums(sums)))
            wrong = yield from self._compare(question, blocks)
            return wire.encode(wire.Compared(wrong))
        except PdkvError as error:
            return wire.encode(wire.Refused(str(error)[:512]))

    def end(self) -> None:
        """Give the memory back, once nothing sums any more; in another thread that ends by an error. Idempotent."""
        self._offers.close()

    def close(self) -> None:
        """:meth:`end`, and let go of the device; no other thread may be at it any more. Idempotent."""
        self.end()
        self._close_mover()

    def layers_of(self, group: int) -> int:
        """Sums of one block."""
        return self.geometry.groups[group].num_layers

    def _compare(self, question: wire.Compare, blocks: wire.Blocks) -> Steps[int]:
        self._require_blocks(question.group, blocks)
        expected = wire.read_sums(question.sums, len(blocks), self.layers_of(question.group))
        found = yield from self.arrived(question.group, blocks)
        wrong = first_difference(expected, found)
        if wrong is None:
            return -1
        if question.is_final:
            self._counts["checksum_failures"] += 1
        return wrong

    def _require_blocks(self, group: int, blocks: wire.Blocks) -> None:
        """Also that the answer is not too long: peers are to ask in parts."""
        if group >= len(self.geometry.groups):
            raise ProtocolError(f"KV-cache group {group} was named, but there are {len(self.geometry.groups)}")
        if int(blocks.max(initial=0)) >= self.geometry.num_blocks:
            raise ProtocolError(f"block {blocks.max()} was named, but only {self.geometry.num_blocks} are committed")
        if len(blocks) > blocks_of_question(self.layers_of(group)):
            raise ProtocolError(f"{len(blocks)} blocks of {self.layers_of(group)} layers have more sums than a message")

    @property
    def _table(self) -> PageSums:
        if self._offers.sums is None:
            raise TransportError("no sums are kept here.")
        return self._offers.sums

    def _close_mover(self) -> None:
        if self._mover is not None:
            self._mover.close()


def blocks_of_question(layers: int) -> int:
    """How many blocks one question may name."""
    return max(1, wire.MAX_SUMS // layers)


def first_difference(expected: wire.SumArray, found: wire.SumArray) -> int | None:
    """The place of the first block that differs in any layer; None where none does."""
    wrong = np.flatnonzero((expected != found).any(axis=1))
    return int(wrong[0]) if len(wrong) else None


def require_summable(geometry: CacheGeometry) -> None:
    """Refuse a cache whose pages the hash cannot take.

    Raises:
        TransportError, GeometryError: it is one.
    """
    if geometry.driver not in ("host", "cuda"):
        raise TransportError(
            f"blocks in {geometry.driver} memory cannot be summed, only those of the host and of CUDA; leave "
            "verification off."
        )
    require_words(geometry, "leave verification off")
