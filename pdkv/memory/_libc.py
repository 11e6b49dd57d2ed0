"""The three libc calls that have no Python API: `mmap` at a fixed address, `munmap` of a part, `madvise` by address.

Every function raises :class:`OSError` with the call's errno. Constants are Linux's, from `asm-generic/mman-common.h`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

PROT_NONE = 0x0
PROT_READ = 0x1
PROT_READ_WRITE = 0x1 | 0x2
MAP_SHARED = 0x01
MAP_PRIVATE = 0x02
MAP_FIXED = 0x10
MAP_ANONYMOUS = 0x20
MAP_NORESERVE = 0x4000
MADV_POPULATE_READ = 22  # Linux 5.14
MADV_POPULATE_WRITE = 23  # Linux 5.14

_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
# The last argument is off_t: 64 bits on every platform that has a GPU worth the name.
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")


def mmap(address: int | None, nbytes: int, prot: int, flags: int, fd: int = -1) -> int:
    """Map `nbytes` of `fd` from its beginning (or anonymous memory, fd -1) and return the address."""
    if nbytes > sys.maxsize:  # ctypes would keep the lower 64 bits in silence and map less
        raise OSError(errno.ENOMEM, f"mmap: {os.strerror(errno.ENOMEM)}")
    result = _libc.mmap(address, nbytes, prot, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        raise _error("mmap")
    return int(result)


def munmap(address: int, nbytes: int) -> None:
    """Remove every mapping in the range."""
    if _libc.munmap(address, nbytes) != 0:
        raise _error("munmap")


def madvise(address: int, nbytes: int, advice: int) -> None:
    """Give the kernel one piece of advice about the range."""
    if _libc.madvise(address, nbytes, advice) != 0:
        raise _error("madvise")
