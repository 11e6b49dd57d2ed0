"""One side of a transport on the bench: a cache with known contents and a transport, both told by plain values."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdkv.errors import StateError
from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig, KVCacheLayout
from pdkv.memory import open_driver
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.connecting import Connecting
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.shards import HeadSlice
from pdkv.transfer.transport import Transfer, Transport

if TYPE_CHECKING:
    import torch

TransportFactory = Callable[[], Transport]

HEADS, TOKENS = 2, 4
#: Small on the host, so that a few blocks lie in several chunks.
HOST_GRANULE = 4096


class TransportSide:
    """Each `do_` method is a command. Commands take and return what JSON can hold, and raise pdkv's errors."""

    def __init__(self, factory: TransportFactory, driver: str = "host") -> None:
        self._factory = factory
        self._driver = open_driver(driver, granule=HOST_GRANULE if driver == "host" else None)
        self._transport: Transport | None = None
        self._cache: GrowableKVCache | None = None
        self._transfers: list[Transfer] = []
        self._begun: list[Connecting] = []

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise StateError("open a transport first.")
        return self._transport

    @property
    def cache(self) -> GrowableKVCache:
        if self._cache is None:
            raise StateError("build a cache first.")
        return self._cache

    def idle(self) -> None:
        """Between commands: what a peer wants of this side goes on."""
        if self._transport is not None:
            self._transport.progress()

    # The transport itself.

    def do_open(self) -> dict[str, Any]:
        """A new transport; what it says of itself."""
        self._transport = self._factory()
        self._transfers, self._begun = [], []
        names = ("name", "can_read", "can_write", "converts", "verifies")
        return {name: getattr(self._transport, name) for name in names} | {"granule": self._driver.granule}

    def do_close(self) -> None:
        self.transport.close()

    def do_finish(self) -> None:
        """The check is over: give everything back."""
        if self._transport is not None:
            self._transport.close()
        self._transport, self._transfers, self._begun = None, [], []
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def do_state(self) -> dict[str, Any]:
        return self.transport.describe_state()

    def do_open_fds(self) -> int:
        """File descriptors of this process."""
        return len(os.listdir("/proc/self/fd"))

    def do_progress(self) -> None:
        self.transport.progress()

    # The cache.

    def do_build(
        self,
        page_nbytes: int,
        layout: str = "LBNHC",
        capacity: int = 48,
        commits: tuple[int, ...] = (20, 40),
        layers: int = 3,
        dtype: str = "float32",
        heads: int = HEADS,
    ) -> None:
        """A cache with one chunk a segment for each of `commits`, all zero. K and V fill pages of `page_nbytes`."""
        if self._cache is not None:
            self._cache.close()
        item = {"float32": 4, "bfloat16": 2}[dtype]
        spec = AttentionSpec(heads, TOKENS, page_nbytes // (2 * heads * TOKENS * item), dtype)
        names = [f"layer.{index}" for index in range(layers)]
        config = KVCacheConfig.uniform(names, spec, capacity, KVCacheLayout[layout])
        self._cache = GrowableKVCache(config, self._driver)
        for blocks in commits:
            self._cache.commit(blocks)

    def do_commit(self, blocks: int, shrink: bool = False) -> int:
        """The generation afterwards."""
        return self.cache.commit(blocks, shrink=shrink).generation

    def do_release(self) -> None:
        self.cache.release_physical()

    def do_recommit(self) -> None:
        self.cache.recommit()

    def do_fill(self, seed: int) -> None:
        """Give every block of every layer bytes of its own."""
        for index, view in enumerate(self._views()):
            for block in range(self.cache.num_committed_blocks):
                self._put(view[block], expected(seed, index, block, _nbytes(view[block])))
        self._driver.synchronize()

    def do_mark(self, block: int, value: int) -> None:
        """Make every byte of a block `value`."""
        for view in self._views():
            self._put(view[block], bytes([value]) * _nbytes(view[block]))
        self._driver.synchronize()

    def do_mark_all(self, value: int) -> None:
        """Make every byte of every block `value`."""
        for block in range(self.cache.num_committed_blocks):
            self.do_mark(block, value)

    def do_stained(self, value: int) -> list[list[int]]:
        """``[layer, block]`` of each block that holds a byte which is `value`."""
        self._driver.synchronize()
        return [
            [index, block]
            for index, view in enumerate(self._views())
            for block in range(self.cache.num_committed_blocks)
            if value in self._get(view[block])
        ]

    def do_is_marked(self, block: int, value: int) -> bool:
        self._driver.synchronize()
        return all(self._get(view[block]) == bytes([value]) * _nbytes(view[block]) for view in self._views())

    def do_damage(self, block: int, layer: int, byte: int) -> None:
        """Change one bit of a block and tell nobody."""
        page = self._views()[layer][block]
        data = bytearray(self._get(page))
        data[byte] ^= 1
        self._put(page, bytes(data))
        self._driver.synchronize()

    def do_differing(self, seed: int, moved: dict[str, list[int]] | None = None) -> list[list[int]]:
        """``[layer, block]`` of each block that does not hold what it should.

        Args:
            seed: what blocks hold that were not moved.
            moved: ``{block: [seed, block there, layer, layer, …]}``: came from elsewhere, in these layers, or in all.
        """
        self._driver.synchronize()
        wrong = []
        for index, view in enumerate(self._views()):
            for block in range(self.cache.num_committed_blocks):
                origin, source, *layers = (moved or {}).get(str(block), [seed, block])
                if layers and index not in layers:
                    origin, source = seed, block
                if self._get(view[block]) != expected(origin, index, source, _nbytes(view[block])):
                    wrong.append([index, block])
        return wrong

    # The contract.

    def do_register(self, engine: str, generation: int, groups: list[list[str]] | None = None) -> None:
        self.transport.register(self.cache, EngineRef(engine, generation), groups=groups)

    def do_unregister(self) -> None:
        self.transport.unregister()

    def do_describe(self) -> str:
        return self.transport.describe().hex()

    def do_connect(
        self, engine: str, generation: int, metadata: str, within_s: float = 20.0, heads: list[int] | None = None
    ) -> None:
        """`heads`: count, first one of the peer, first one here."""
        wanted = None if heads is None else HeadSlice(*heads)
        peer = EngineRef(engine, generation)
        self.transport.connect(peer, bytes.fromhex(metadata), timeout_s=within_s, heads=wanted)

    def do_begin_connect(self, engine: str, generation: int, metadata: str) -> int | None:
        """Begin to connect; its number among those, None where it is connected already."""
        begun = self.transport.begin_connect(EngineRef(engine, generation), bytes.fromhex(metadata), timeout_s=20.0)
        if begun is None:
            return None
        self._begun.append(begun)
        return len(self._begun) - 1

    def do_poll_connect(self, number: int) -> bool:
        return self._begun[number].poll()

    def do_abandon_connect(self, number: int) -> None:
        self._begun[number].abandon()

    def do_disconnect(self, engine: str) -> None:
        self.transport.disconnect(engine)

    def do_post(self, engine: str, generation: int, pairs: list[list[int]], reads: bool) -> int:
        """Post a transfer; its number."""
        post = self.transport.read if reads else self.transport.write
        self._transfers.append(post(EngineRef(engine, generation), [BlockPair(*pair) for pair in pairs]))
        return len(self._transfers) - 1

    def do_poll(self, number: int) -> str:
        return str(self._transfers[number].poll())

    def do_wait(self, number: int, within_s: float) -> str:
        return str(self._transfers[number].wait(within_s))

    def do_reason(self, number: int) -> str:
        return self._transfers[number].reason

    def do_abandon(self, number: int) -> bool:
        return self._transfers[number].abandon()

    def do_fences_reads(self, engine: str, generation: int) -> bool:
        return self.transport.fences_reads(EngineRef(engine, generation))

    def do_offer(self, blocks: list[int]) -> None:
        """Offer blocks; they are summed when this returns."""
        self.transport.offer(blocks)
        self._driver.synchronize()
        self.transport.progress()

    def do_withdraw(self, blocks: list[int]) -> None:
        self.transport.withdraw(blocks)

    # Bytes.

    def _views(self) -> list[torch.Tensor]:
        return list(self.cache.views().values())

    @staticmethod
    def _put(page: torch.Tensor, data: bytes) -> None:
        import torch

        page.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(page.dtype).view(page.shape))

    @staticmethod
    def _get(page: torch.Tensor) -> bytes:
        import torch

        return page.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def expected(seed: int, layer: int, block: int, nbytes: int) -> bytes:
    """What a block of a layer holds: noise of its own, in logical order ``[H, N, C]``."""
    import numpy as np

    # Small whole numbers: any bytes would do, were some not NaNs, which a copy through a float type may change.
    noise = np.frombuffer(np.random.default_rng([seed, layer, block]).bytes(nbytes), np.uint8) & 63
    return noise.tobytes()


def _nbytes(page: torch.Tensor) -> int:
    return page.numel() * page.element_size()
