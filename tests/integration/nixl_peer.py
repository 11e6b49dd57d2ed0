"""Real NIXL agents in child processes, for tests of what a peer can reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdkv.testing.child import Child

_MAIN = Path(__file__).with_name("nixl_peer_main.py")

#: Small pages that are no multiple of the granule, so that blocks lie across chunk borders: 3 heads * 16 tokens *
#: 2 * 20 elements of 4 bytes = 7680 bytes a page, 8.5 pages a granule.
UNEVEN = {"layers": 3, "num_blocks": 64, "heads": 3, "head_size": 20, "granule": 64 << 10}
#: Pages of 8 KiB, 8 to a granule: committing a multiple of 8 blocks fills granules to their ends.
EVEN = {**UNEVEN, "heads": 4, "head_size": 16}


class NixlPeer(Child):
    """One process with one agent called `name`, over UCX transports `tls` ("" leaves the choice to UCX)."""

    def __init__(self, name: str, folder: Path, tls: str = "") -> None:
        environment = {"OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
        if tls:
            environment["UCX_TLS"] = tls
        super().__init__(_MAIN, folder / f"{name}.log", name, environment=environment)
        self.name = name


@dataclass
class Pair:
    """An owner of a cache and a peer that reads from it; the steps that every test takes."""

    owner: NixlPeer
    reader: NixlPeer
    geometry: dict[str, list[int]] = field(default_factory=dict)
    extents: list[list[int]] = field(default_factory=list)

    def build(self, layout: str = "LBNHC", **shape: int) -> None:
        """A cache in the owner, nothing committed."""
        self.geometry = self.owner.ask("build", layout=layout, **{**UNEVEN, **shape})

    def commit(self, num_blocks: int, *, defragment: bool = False) -> dict[str, Any]:
        """Commit in the owner; keeps the extents for :meth:`connect`."""
        report = self.owner.ask("commit", num_blocks=num_blocks, defragment=defragment)
        self.extents = report["extents"]
        return dict(report)

    def register(self, what: str = "extents") -> list[list[int]]:
        """Register in the owner; the ranges that were not registered before."""
        return list(self.owner.ask("register", what=what))

    def connect(self) -> None:
        """Let the reader know the owner, or know it again, with the extents of the last commit."""
        blocks = max(page[2] for page in self.geometry.values()) * UNEVEN["num_blocks"] * len(self.geometry)
        metadata = self.owner.ask("metadata")
        name = self.reader.ask("connect", metadata=metadata, extents=self.extents, buffer_nbytes=blocks)
        assert name == self.owner.name

    def disconnect(self) -> None:
        """Let the reader forget the owner, and the owner its registrations: in this order, as before a remap."""
        self.reader.ask("disconnect", peer=self.owner.name)
        self.owner.ask("deregister")

    def read(self, blocks: int, seed: int) -> dict[str, Any]:
        """Blocks ``0..blocks-1`` of all layers; see `Peer.do_read`."""
        answer = self.reader.ask("read", peer=self.owner.name, geometry=self.geometry, blocks=blocks, seed=seed)
        return dict(answer)

    def write(self, blocks: int, seed: int) -> str:
        """Write into blocks ``0..blocks-1`` of all layers of the owner."""
        return str(self.reader.ask("write", peer=self.owner.name, geometry=self.geometry, blocks=blocks, seed=seed))

    def read_range(self, address: int, nbytes: int, *, checked: bool) -> str:
        """One range; unchecked, the reader does not look at the owner's extents."""
        return str(self.reader.ask("read_range", peer=self.owner.name, address=address, nbytes=nbytes, checked=checked))

    def block_address(self, layer: int, block: int) -> int:
        """Where a block of the owner begins."""
        base, stride, _ = list(self.geometry.values())[layer]
        return base + block * stride

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return next(iter(self.geometry.values()))[2]
