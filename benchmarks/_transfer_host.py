"""The rows of the host: ipc beside memcpy, and beside other libraries that read the same blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack

from _transfer_beside import MOONCAKE, NIXL, Start, others
from _transfer_cache import build, require_moved
from _transfer_ipc_reader import BLOCK_NBYTES, LAYERS, TOKENS, Reader, scattered
from _transfer_rows import Row, bandwidth_share, interleaved, reference, time_ratio

from pdkv.testing.child import Child
from pdkv_connectors.ipc import BlockColumns


def host_rows(owner: Child, start: Start, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """All rows; raises SystemExit where a byte is wrong."""
    wanted, repeats = (32, 3) if quick else (256, 9)
    blocks = 2 * wanted
    nbytes = wanted * BLOCK_NBYTES
    there = owner.ask("build", layers=LAYERS, blocks=blocks)
    with ExitStack() as stack:
        cache = build("host", layers=LAYERS, blocks=blocks)
        stack.callback(cache.close)
        other = build("host", layers=LAYERS, blocks=blocks // 4, tokens=4 * TOKENS, layout="LBNHC")
        stack.callback(other.close)
        plain, checked = Reader(cache, there, verify=False), Reader(cache, there)
        slices, numpy = (Reader(cache, there, verify=verify, compiled=False) for verify in (False, True))
        converting = Reader(other, there, verify=False)
        for reader in (plain, checked, slices, numpy, converting):
            stack.callback(reader.transport.close)
        pairs = BlockColumns(*(scattered(blocks, wanted, seed) for seed in (1, 2)))
        beside = others(start, stack, pairs, say, layers=LAYERS, blocks=blocks)
        buffers = [bytearray(nbytes) for _ in range(2)]
        from_, to = ((ctypes.c_char * nbytes).from_buffer(buffer) for buffer in buffers)
        times = interleaved(
            {
                "memcpy": lambda: ctypes.memmove(to, from_, nbytes),
                "plain": lambda: plain.read(pairs),
                "checked": lambda: checked.read(pairs),
                "convert": lambda: converting.read(pairs),
                "slices": lambda: slices.read(pairs),
                "numpy": lambda: numpy.read(pairs),
                **beside,
            },
            repeats,
        )
        require_moved(cache, pairs.source.tolist(), pairs.destination.tolist())
        require_moved(other, pairs.source.tolist(), pairs.destination.tolist())
    say("host done")
    copy = reference("memcpy, one thread", times["memcpy"], nbytes)
    as_it_is = bandwidth_share("ipc on the host, scattered 32 KiB blocks", times["plain"], copy, 0.65, nbytes)
    rows = [
        copy,
        as_it_is,
        time_ratio("the same, sums verified", times["checked"], as_it_is, None, nbytes),
        time_ratio("16 -> 64 tokens, HNC -> NHC", times["convert"], as_it_is, None, nbytes),
        bandwidth_share("without kernels, by memoryview slices", times["slices"], copy, None, nbytes),
        time_ratio("without kernels, sums verified by numpy", times["numpy"], as_it_is, None, nbytes),
    ]
    for name, target in ((NIXL, 1.8), (MOONCAKE, None)):
        if name in times:
            theirs = reference(f"{name}, the same blocks", times[name], nbytes)
            rows += [theirs, bandwidth_share(f"ipc beside {name}", times["plain"], theirs, target, nbytes)]
    return rows
