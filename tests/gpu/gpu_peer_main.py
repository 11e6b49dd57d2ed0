"""A process with CUDA memory: owner of a cache, importer of another's chunks, or NIXL peer. Started, never imported.

Each `do_` method of :class:`Peer` is a command of `child.serve`.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

import torch

from pdkv.errors import StaleGenerationError
from pdkv.kvcache import AttentionSpec, Extent, GrowableKVCache, KVCacheConfig, split_at_extents
from pdkv.memory import MemoryDriver, open_driver
from pdkv.testing.child import serve

#: 256 MiB by software emulation take half a second, and 18 s in phases in which loopback tcp moves 0.015 GB/s.
TRANSFER_TIMEOUT_S = 45.0
MAX_FDS = 250  # Linux passes 253 at once


class Peer:
    """One process on device 0."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.driver: MemoryDriver = open_driver("cuda")
        self.cache: GrowableKVCache | None = None
        self.agent: Any = None
        self.registered: list[Any] = []
        self.imported: list[tuple[int, int, Any]] = []
        self.extents: tuple[Extent, ...] = ()
        self.peer_generation = -1
        self.local_base = self.local_nbytes = 0

    def idle(self) -> None:
        """Nothing: the agent has a thread of its own, for a transport by emulation moves bytes only while one runs."""

    def do_free(self) -> int:
        """Free bytes on the device."""
        return self.driver.memory_info().free

    # -- as owner

    def do_build(self, num_blocks: int, commits: list[int]) -> dict[str, Any]:
        """A cache of one layer with pages of 64 KiB; one chunk for each commit."""
        spec = AttentionSpec(num_kv_heads=8, block_size=16, head_size=128, dtype="bfloat16")
        self.cache = GrowableKVCache(KVCacheConfig.uniform(["layer"], spec, num_blocks), self.driver)
        for blocks in commits:
            self.cache.commit(blocks)
        return self.do_state()

    def do_state(self) -> dict[str, Any]:
        """Where the cache is, how it lies there, and its generation."""
        extents = [[e.address, e.nbytes, e.device_id, e.segment, e.chunk] for e in self._cache.extents()]
        return {
            "address": self._cache.address,
            "generation": self._cache.generation,
            "extents": extents,
        }

    def do_fill(self, seed: int) -> None:
        """Give every word of the committed prefix its own value."""
        raw = self._cache.committed_raw()[0]
        words(raw).copy_(pattern(0, raw.numel(), seed))
        torch.cuda.synchronize()

    def do_holds(self, offset: int, nbytes: int, seed: int) -> bool:
        """Whether the range holds what `seed` stands for."""
        torch.cuda.synchronize()
        raw = self._cache.committed_raw()[0][offset : offset + nbytes]
        return torch.equal(words(raw), pattern(offset, nbytes, seed))

    def do_release(self) -> dict[str, int]:
        """Release; the report beside free memory as the driver counts it."""
        before = self.driver.memory_info().free
        report = self._cache.release_physical()
        gained = self.driver.memory_info().free - before
        return {
            "released": report.released,
            "given_back": report.given_back,
            "pinned": report.pinned,
            "gained": gained,
        }

    def do_recommit(self) -> dict[str, Any]:
        self._cache.recommit()
        return self.do_state()

    # -- as importer of another process's chunks

    def do_import(self, path: str) -> int:
        """Take descriptors and sizes from the socket at `path` and map the chunks; returns how many there were."""
        from cuda.bindings import driver as cu

        api: Any = self.driver._api  # type: ignore[attr-defined]
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TRANSFER_TIMEOUT_S)
            connection.connect(path)
            message, fds, _, _ = socket.recv_fds(connection, 1 << 16, MAX_FDS)
        sizes = [int(word) for word in message.split()]
        with api.on_device():
            for fd, nbytes in zip(fds, sizes, strict=True):
                handle = api.call("cuMemImportFromShareableHandle", fd, kind)
                address = api.address_reserve(nbytes, self.driver.granule)
                api.map(address, nbytes, int(handle))
                api.set_access(address, nbytes)
                self.imported.append((address, nbytes, handle))
        for fd in fds:
            socket.close(fd)
        return len(self.imported)

    def do_let_go(self) -> None:
        """Unmap and release everything that was imported."""
        api: Any = self.driver._api  # type: ignore[attr-defined]
        with api.on_device():
            for address, nbytes, handle in self.imported:
                api.unmap(address, nbytes)
                api.release(int(handle))
                api.address_free(address, nbytes)
        self.imported.clear()

    # -- as NIXL agent

    def do_agent(self) -> str:
        """Make the agent; returns the version of NIXL."""
        from importlib.metadata import version

        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(self.name, nixl_agent_config(enable_prog_thread=True))
        return version("nixl")

    def do_register(self, ranges: list[list[int]]) -> None:
        for address, nbytes in ranges:
            self.registered.append(self.agent.register_memory([(address, nbytes, 0, "")], mem_type=self._kind))

    def do_deregister(self) -> None:
        for handle in self.registered:
            self.agent.deregister_memory(handle)
        self.registered.clear()

    def do_metadata(self) -> str:
        return str(self.agent.get_agent_metadata().hex())

    def do_connect(self, metadata: str, state: dict[str, Any], nbytes: int) -> str:
        """Know an owner by its metadata and by the extents and generation that it published with them."""
        self.extents = tuple(Extent(*fields) for fields in state["extents"])
        self.peer_generation = state["generation"]
        if self.cache is None:
            blocks = nbytes // (64 << 10)
            self.do_build(blocks, [blocks])
            self.local_base, self.local_nbytes = self._cache.address, nbytes
            self.do_register([[self.local_base, nbytes]])
        name = self.agent.add_remote_agent(bytes.fromhex(metadata))
        return name.decode() if isinstance(name, bytes) else str(name)

    def do_disconnect(self, peer: str) -> None:
        self.agent.remove_remote_agent(peer)

    def do_transfer(
        self,
        peer: str,
        operation: str,
        base: int,
        offset: int,
        nbytes: int,
        seed: int,
        split: bool,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """READ or WRITE one range of the owner's cache.

        Args:
            base: the owner's address of its cache.
            split: at the borders of the owner's extents, as pdkv does; else one descriptor for the whole.
            generation: the owner's generation now; one other than it published is refused before anything is posted.

        Returns:
            `outcome`: "right", "wrong", "timeout" or the error. Of a WRITE "posted" is all that can be told here.
        """
        if generation is not None and generation != self.peer_generation:
            raise StaleGenerationError(
                f"the owner is at generation {generation}, its metadata here at {self.peer_generation}; connect again"
            )
        raw = self._cache.committed_raw()[0][offset : offset + nbytes]
        words(raw).copy_(pattern(offset, nbytes, seed if operation == "WRITE" else -1))
        torch.cuda.synchronize()
        parts = [(base + offset, nbytes)]
        if split:
            parts = [(part.address, part.nbytes) for part in split_at_extents(self.extents, base + offset, nbytes)]
        start = time.perf_counter()
        try:
            state = self._post(operation, peer, base, parts)
        except Exception as error:
            return {"outcome": f"error: {type(error).__name__}", "descriptors": len(parts)}
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        outcome = {"DONE": "posted", "ERR": "error: ERR", "PROC": "timeout"}[state]
        if state == "DONE" and operation == "READ":
            outcome = "right" if torch.equal(words(raw), pattern(offset, nbytes, seed)) else "wrong"
        return {"outcome": outcome, "descriptors": len(parts), "gb_per_s": round(nbytes / seconds / 1e9, 3)}

    # -- helpers

    @property
    def _cache(self) -> GrowableKVCache:
        if self.cache is None:
            raise RuntimeError("build a cache first")
        return self.cache

    @property
    def _kind(self) -> str:
        return "VRAM" if self._cache.raw_tensor().is_cuda else "DRAM"

    def _post(self, operation: str, peer: str, base: int, parts: list[tuple[int, int]]) -> str:
        local = [(self.local_base + address - base, nbytes, 0) for address, nbytes in parts]
        remote = [(address, nbytes, 0) for address, nbytes in parts]
        handle = self.agent.initialize_xfer(
            operation,
            self.agent.get_xfer_descs(local, mem_type=self._kind),
            self.agent.get_xfer_descs(remote, mem_type=self._kind),
            peer,
        )
        deadline = time.monotonic() + TRANSFER_TIMEOUT_S
        state: str = self.agent.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            state = self.agent.check_xfer_state(handle)
        if state != "PROC":
            self.agent.release_xfer_handle(handle)
        return state


def words(raw: torch.Tensor) -> torch.Tensor:
    """The bytes as int32 ``[nbytes / 4]``."""
    return raw.view(torch.int32)


def pattern(offset: int, nbytes: int, seed: int) -> torch.Tensor:
    """int32 ``[nbytes / 4]``: what `seed` stands for from byte `offset` on; every word of every seed is different."""
    index = torch.arange(offset // 4, (offset + nbytes) // 4, dtype=torch.int64, device="cuda")
    return ((index * 2654435761 + seed * 40503) % 2147483647).to(torch.int32)


if __name__ == "__main__":
    peer = Peer(sys.argv[2])
    serve(peer, int(sys.argv[1]), peer.idle)
