"""A process with a real NIXL agent and a growable cache. Started by `nixl_peer.NixlPeer`, never imported.

The agent has no progress thread, as in pdkv's connectors: the process polls it between commands, which is what lets a
peer's transfer over tcp go on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

from pdkv.kvcache import AttentionSpec, Extent, GrowableKVCache, KVCacheConfig, KVCacheLayout, split_at_extents
from pdkv.memory import open_driver
from pdkv.testing.child import serve

#: A transfer of a few MiB takes milliseconds; the rest is for a machine that is busy with something else.
TRANSFER_TIMEOUT_S = 30.0


class Peer:
    """Each `do_` method is a command. As owner it fills and registers its cache, as initiator it reads and writes."""

    def __init__(self, name: str) -> None:
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
        self.cache: GrowableKVCache | None = None
        self.registered: dict[tuple[int, int], Any] = {}
        self.buffer = np.empty(0, np.uint8)
        self.extents: tuple[Extent, ...] = ()

    def poll(self) -> None:
        """Let the transport make progress."""
        self.agent.get_new_notifs()

    # As owner

    def do_build(
        self, layers: int, num_blocks: int, heads: int, head_size: int, layout: str, granule: int
    ) -> dict[str, Any]:
        """A cache with nothing committed; says where blocks lie: ``{layer: [address, block_stride, page_bytes]}``."""
        if self.cache is not None:
            self.cache.close()
        spec = AttentionSpec(num_kv_heads=heads, block_size=16, head_size=head_size, dtype="float32")
        names = [f"layer{index}" for index in range(layers)]
        config = KVCacheConfig.uniform(names, spec, num_blocks, KVCacheLayout[layout])
        self.cache = GrowableKVCache(config, open_driver("host", granule=granule))
        views = self._cache.views()
        return {name: [view.data_ptr(), view.stride(0) * 4, spec.page_bytes] for name, view in views.items()}

    def do_commit(self, num_blocks: int, defragment: bool = False) -> dict[str, Any]:
        """What came of it, and the extents as the driver reports them."""
        report = self._cache.commit(num_blocks, defragment=defragment)
        return {
            "remapped": report.remapped,
            "generation": report.generation,
            "chunks_per_segment": self._cache.chunks_per_segment(),
            "extents": [[e.address, e.nbytes, e.device_id, e.segment, e.chunk] for e in self._cache.extents()],
        }

    def do_fill(self, seed: int, first: int = 0) -> None:
        """Write each committed block's own bytes, from block `first` on."""
        for layer, view in enumerate(self._committed_bytes()):
            for block in range(first, len(view)):
                view[block] = expected(seed, layer, block, view.shape[1])

    def do_differing(self, seed: int) -> list[list[int]]:
        """``[layer, block]`` of every committed block that does not hold the bytes that `seed` stands for."""
        return [
            [layer, block]
            for layer, view in enumerate(self._committed_bytes())
            for block in range(len(view))
            if not np.array_equal(view[block], expected(seed, layer, block, view.shape[1]))
        ]

    def do_register(self, what: str) -> list[list[int]]:
        """Register what is not registered yet and return those ranges.

        Args:
            what: ``extents``; or, as connectors do that know nothing of pdkv, the storages of ``views`` (capacity) or
                of ``committed_views``.
        """
        if what == "extents":
            ranges = [(extent.address, extent.nbytes) for extent in self._cache.extents()]
        else:
            storages = [view.untyped_storage() for view in getattr(self._cache, what)().values()]
            ranges = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
        new = [entry for entry in dict.fromkeys(ranges) if entry not in self.registered]
        for address, nbytes in new:
            handle = self.agent.register_memory([(address, nbytes, 0, "")], mem_type="DRAM")
            self.registered[address, nbytes] = handle
        return [list(entry) for entry in new]

    def do_deregister(self) -> None:
        """Forget all registrations of the cache."""
        for handle in self.registered.values():
            self.agent.deregister_memory(handle)
        self.registered.clear()

    def do_metadata(self) -> str:
        return self.agent.get_agent_metadata().hex()

    def do_ping(self) -> str:
        return self.agent.name

    # As initiator

    def do_connect(self, metadata: str, extents: list[list[int]], buffer_nbytes: int) -> str:
        """Know a peer, with the extents that it published. A second time takes its newer metadata and extents."""
        self.extents = tuple(Extent(*fields) for fields in extents)
        if self.buffer.nbytes < buffer_nbytes:
            self.buffer = np.zeros(buffer_nbytes, np.uint8)
            self.agent.register_memory([(self.buffer.ctypes.data, buffer_nbytes, 0, "")], mem_type="DRAM")
        name = self.agent.add_remote_agent(bytes.fromhex(metadata))
        return name.decode() if isinstance(name, bytes) else name

    def do_disconnect(self, peer: str) -> None:
        self.agent.remove_remote_agent(peer)

    def do_read(self, peer: str, geometry: dict[str, list[int]], blocks: int, seed: int) -> dict[str, Any]:
        """Read blocks ``0..blocks-1`` of every layer and compare each byte with what `seed` stands for.

        Ranges are split at the borders of the peer's extents before anything is posted.

        Returns:
            `state` of the transfer, the number of descriptors that became of the blocks, and the `differing` blocks.
        """
        pages, descriptors = self._plan(geometry, blocks)
        self.buffer[:] = 0xEE
        state = self._transfer("READ", peer, descriptors)
        differing = [
            [layer, block]
            for layer, block, begin, nbytes in pages
            if not np.array_equal(self.buffer[begin : begin + nbytes], expected(seed, layer, block, nbytes))
        ]
        return {"state": state, "descriptors": len(descriptors), "pages": len(pages), "differing": differing}

    def do_write(self, peer: str, geometry: dict[str, list[int]], blocks: int, seed: int) -> str:
        """Write what `seed` stands for into blocks ``0..blocks-1`` of every layer of the peer."""
        pages, descriptors = self._plan(geometry, blocks)
        for layer, block, begin, nbytes in pages:
            self.buffer[begin : begin + nbytes] = expected(seed, layer, block, nbytes)
        return self._transfer("WRITE", peer, descriptors)

    def do_read_range(self, peer: str, address: int, nbytes: int, checked: bool) -> str:
        """Read one range; where `checked` is false, without asking the peer's extents, as a naive peer would."""
        parts = split_at_extents(self.extents, address, nbytes) if checked else [Extent(address, nbytes, 0, 0, 0)]
        offsets = [part.address - address for part in parts]
        return self._transfer("READ", peer, [(o, p.address, p.nbytes) for o, p in zip(offsets, parts, strict=True)])

    def do_meet(self, metadata: str, forget: str | None) -> str:
        """Drop one agent and know another one; its name."""
        if forget is not None:
            self.agent.remove_remote_agent(forget)
        name = self.agent.add_remote_agent(bytes.fromhex(metadata))
        return name.decode() if isinstance(name, bytes) else name

    def do_move(self, peer: str, pages: list[list[int]], value: int | None) -> str:
        """Read pages ``[address, nbytes]`` of the peer, as hex; with a `value`, write them, every byte of it."""
        nbytes = sum(page[1] for page in pages)
        if self.buffer.nbytes < nbytes:
            self.buffer = np.zeros(nbytes, np.uint8)
            self.agent.register_memory([(self.buffer.ctypes.data, nbytes, 0, "")], mem_type="DRAM")
        self.buffer[:] = 0 if value is None else value
        offsets = np.cumsum([0, *(page[1] for page in pages)])[:-1]
        descriptors = [(int(offset), *page) for offset, page in zip(offsets, pages, strict=True)]
        state = self._transfer("READ" if value is None else "WRITE", peer, descriptors)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")
        return self.buffer[:nbytes].tobytes().hex()

    # Helpers

    @property
    def _cache(self) -> GrowableKVCache:
        if self.cache is None:
            raise RuntimeError("build a cache first")
        return self.cache

    def _committed_bytes(self) -> Iterator[np.ndarray[Any, Any]]:
        """For each layer uint8 ``[committed blocks, page_bytes]`` over the cache's own memory."""
        for view in self._cache.committed_views().values():
            pages = view.numpy().view(np.uint8)
            strides = (view.stride(0) * view.element_size(), 1)
            nbytes = view[0].numel() * view.element_size()
            yield np.lib.stride_tricks.as_strided(pages, (view.shape[0], nbytes), strides)

    def _plan(self, geometry: dict[str, list[int]], blocks: int) -> tuple[list[Any], list[tuple[int, int, int]]]:
        """Where each page comes to lie in the buffer, and ``(buffer offset, remote address, nbytes)`` to transfer."""
        pages, descriptors, begin = [], [], 0
        for layer, (base, stride, nbytes) in enumerate(geometry.values()):
            for block in range(blocks):
                address = base + block * stride
                pages.append((layer, block, begin, nbytes))
                for part in split_at_extents(self.extents, address, nbytes):
                    descriptors.append((begin + part.address - address, part.address, part.nbytes))
                begin += nbytes
        return pages, descriptors

    def _transfer(self, operation: str, peer: str, descriptors: list[tuple[int, int, int]]) -> str:
        """Post one transfer and see it through; "DONE", "ERR", or "PROC" where it is not over in time."""
        base = self.buffer.ctypes.data
        local = self.agent.get_xfer_descs([(base + offset, n, 0) for offset, _, n in descriptors], mem_type="DRAM")
        remote = self.agent.get_xfer_descs([(address, n, 0) for _, address, n in descriptors], mem_type="DRAM")
        handle = self.agent.initialize_xfer(operation, local, remote, peer)
        deadline = time.monotonic() + TRANSFER_TIMEOUT_S
        state: str = self.agent.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            state = self.agent.check_xfer_state(handle)
        if state != "PROC":
            self.agent.release_xfer_handle(handle)
        return state


def expected(seed: int, layer: int, block: int, nbytes: int) -> np.ndarray[Any, Any]:
    """The bytes of one page; different in every place for every seed, layer and block."""
    return np.frombuffer(np.random.default_rng([seed, layer, block]).bytes(nbytes), np.uint8)


if __name__ == "__main__":
    peer = Peer(sys.argv[2])
    serve(peer, int(sys.argv[1]), peer.poll)
