"""Compiled copies and sums for memory on the host; without llvmlite there are none, and numpy takes their place."""

from __future__ import annotations

import logging
import threading

from pdkv_connectors.native.compiled import Kernels, Numbers, UnitShape

__all__ = ["Kernels", "Numbers", "UnitShape", "find_kernels", "streams"]

logger = logging.getLogger(__name__)

STREAM_NBYTES = 1 << 20
"""From so many bytes on a copy writes past the caches. A read of what was written, right afterwards, takes longer then;
`python benchmarks/streaming.py` shows from where on both together take less long. On a Xeon with 2 MiB of L2 a core
that took 4 % longer for 512 KiB, as long for 1 MiB, 4 % less for 2 MiB and 15 % less for 64 MiB."""

_lock = threading.Lock()
_found: list[Kernels | None] = []


def streams(nbytes: int) -> bool:
    """Whether a copy of so many bytes in all is to write past the caches."""
    return nbytes >= STREAM_NBYTES


def find_kernels() -> Kernels | None:
    """The kernels of this process, compiled by the first call; None where they cannot be had, which is logged once."""
    with _lock:
        if not _found:
            _found.append(_compile())
        return _found[0]


def _compile() -> Kernels | None:
    try:
        return Kernels()
    except Exception as error:  # an AttributeError, for one, of an llvmlite that has another API: nothing needs them
        missing = isinstance(error, ImportError)
        logger.warning(
            "Blocks in host memory are copied and summed without compiled kernels, which takes longer (%s); %s.",
            " ".join(str(error).split()),  # LLVM shows the line, with an arrow below it
            "`pip install 'pdkv[host]'` brings them" if missing else "see whether llvmlite works on this machine",
        )
        return None
