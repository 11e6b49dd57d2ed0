"""Other libraries that read the very same blocks, where they are installed: NIXL by itself, and Mooncake over tcp."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _transfer_cache import PAGE_NBYTES_OF_TOKEN, build, require_moved

from pdkv.testing.child import Child
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.geometry import CacheGeometry

if TYPE_CHECKING:
    from pdkv_connectors.ipc import BlockColumns

HERE = Path(__file__).parent
NIXL, MOONCAKE = "NIXL itself", "Mooncake over tcp"
PAGE_NBYTES = 16 * PAGE_NBYTES_OF_TOKEN
TIMEOUT_S = 120.0
AT_ONCE = 1024  # ranges of one call of Mooncake's; its queue refuses some thousands

Start = Callable[[Path], Child]
Read = Callable[[], None]


def others(
    start: Start, stack: ExitStack, pairs: BlockColumns, say: Callable[[str], None], **shape: Any
) -> dict[str, Read]:
    """What reads `pairs` from a process of its own, by name.

    Args:
        start: starts one of this folder's owners; `stack` ends it, and closes what else is opened.
    """
    found: dict[str, Read] = {}
    if find_spec("nixl") is not None:
        found[NIXL] = _nixl(start(HERE / "_transfer_nixl_owner.py"), stack, pairs, shape)
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        say(f"without Mooncake ({error}); `pip install mooncake-transfer-engine-non-cuda` and libibverbs bring it")
    else:
        found[MOONCAKE] = _mooncake(start(HERE / "_transfer_mooncake_owner.py"), stack, pairs, shape)
    return found


def _nixl(owner: Child, stack: ExitStack, pairs: BlockColumns, shape: dict[str, Any]) -> Read:
    """As stock vLLM reads: descriptors prepared once, one for each block and layer, neighbours merged by NIXL."""
    from _transfer_nixl import Reader

    reader = Reader(owner, "host", "beside", stack, variables={}, **shape)
    prepared = reader.prepare()
    stack.callback(lambda: [side.release() for side in prepared])
    named = [BlockPair(*pair) for pair in pairs]

    def read() -> None:
        reader.read_prepared(prepared, named, merge=True)

    read()
    require_moved(reader.cache, pairs.source.tolist(), pairs.destination.tolist())
    return read


def _mooncake(owner: Child, stack: ExitStack, pairs: BlockColumns, shape: dict[str, Any]) -> Read:
    from mooncake.engine import TransferEngine

    there = owner.ask("build", timeout_s=TIMEOUT_S, **shape)
    cache = build("host", **shape)
    stack.callback(cache.close)
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise SystemExit("transfer: Mooncake did not start")
    if engine.register_memory(cache.address, cache.bytes_reserved):
        raise SystemExit("transfer: Mooncake did not register the cache")
    geometry = CacheGeometry.of(cache, None)

    def read() -> None:
        here = places(geometry, cache.address, pairs.destination)
        peer = places(geometry, there["address"], pairs.source)
        for first in range(0, len(here), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            nbytes = [PAGE_NBYTES] * len(here[part])
            if engine.batch_transfer_sync_read(there["server"], here[part], peer[part], nbytes):
                raise SystemExit("transfer: Mooncake could not read")

    read()
    require_moved(cache, pairs.source.tolist(), pairs.destination.tolist())
    return read


def places(geometry: CacheGeometry, base: int, blocks: np.ndarray[Any, Any]) -> list[int]:
    """Addresses of these blocks in each layer, layer by layer."""
    (run,) = geometry.layers
    layers = base + run.offset + np.arange(run.count) * run.layer_stride
    return np.add.outer(layers, blocks.astype(np.int64) * run.block_stride).ravel().tolist()
