"""Whether a peer really reads what is in the KV cache, at the edges of every extent, and how fast.

NIXL accepts registrations that then move other bytes without an error: over several chunks, or of memory that was
replaced. Only a comparison shows it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdkv.errors import TransportError
from pdkv_connectors.nixl.probe import measure_read

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

EDGE_NBYTES = 64


@dataclass(frozen=True, slots=True)
class ProbedExtents:
    """What a second process read: `edges` ranges that were right, and the bandwidth of one large READ in GB/s."""

    edges: int
    gb_per_s: float
    transport: str

    def __str__(self) -> str:
        return f"{self.edges} edges of extents read right, {self.gb_per_s:.2f} GB/s by {self.transport}"


def probe_extents(agent: Any, cache: GrowableKVCache, memory: str, *, timeout_s: float) -> ProbedExtents:
    """Have another process read the first and the last bytes of each extent, and the largest extent for its bandwidth.

    Bytes that are all zero, as in a fresh cache, are replaced by noise meanwhile: zeros could come from anywhere. So
    nothing else may touch the cache.

    Raises:
        ConnectorError: the other process could not read.
        TransportError: it read something else than is there.
    """
    edges = edges_of(cache)
    largest = max(cache.extents(), key=lambda extent: extent.nbytes)
    with _noise(cache, edges) as contents:
        report = measure_read(
            agent,
            largest.address,
            largest.nbytes,
            memory=memory,
            device_id=largest.device_id,
            timeout_s=timeout_s,
            look_at=[(cache.address + offset, nbytes) for offset, nbytes in edges],
        )
    wrong = [edge for edge, wanted, found in zip(edges, contents, report.contents, strict=True) if wanted != found]
    if wrong:
        raise TransportError(
            f"a peer read other bytes than the KV cache holds, at {len(wrong)} of {len(edges)} edges of extents (first "
            f"at byte {wrong[0][0]}), by {report.transport}; NIXL does not reach this memory, so use another transport."
        )
    return ProbedExtents(len(edges), report.gb_per_s, report.transport)


def edges_of(cache: GrowableKVCache) -> tuple[tuple[int, int], ...]:
    """Offset and length of the first and last bytes of each extent; they are where chunks meet."""
    found = []
    for extent in cache.extents():
        nbytes = min(EDGE_NBYTES, extent.nbytes)
        found += [(extent.address - cache.address, nbytes), (extent.end - nbytes - cache.address, nbytes)]
    return tuple(dict.fromkeys(found))


@contextmanager
def _noise(cache: GrowableKVCache, edges: Sequence[tuple[int, int]]) -> Iterator[list[bytes]]:
    """What the edges hold while the block runs; those of zeros hold noise, and zeros again afterwards."""
    import torch

    raw = cache.raw_tensor()
    parts = [raw[offset : offset + nbytes] for offset, nbytes in edges]
    zeros = [part for part in parts if not part.any()]
    for part in zeros:
        part.copy_(torch.frombuffer(bytearray(secrets.token_bytes(part.numel())), dtype=torch.int8))
    cache.driver.synchronize()
    try:
        yield [part.cpu().numpy().tobytes() for part in parts]
    finally:
        for part in zeros:
            part.zero_()
        cache.driver.synchronize()
