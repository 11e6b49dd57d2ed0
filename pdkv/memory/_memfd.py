"""Anonymous memory with a file descriptor: how one is made, filled with pages, shared, and seen to be shared."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal

# Shown in /proc/self/maps as "/memfd:pdkv-chunk (deleted)".
_NAME = "pdkv-chunk"
# fallocate gives up at any signal and undoes its work: in one call, a large chunk would never be done under a
# profiler's timer.
_SLICE_NBYTES = 2 << 20
_MFD_ALLOW_SEALING = 0x2
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; some systems refuse memfds without it
_F_SETSIG = 10


def create(nbytes: int) -> int:
    """A memfd of `nbytes` with every page allocated, closed on exec.

    Raises:
        OSError: EMFILE or ENFILE (no descriptor left), ENOMEM or ENOSPC (no memory left), EFBIG (`ulimit -f`).
    """
    fd = _new()
    try:
        os.ftruncate(fd, nbytes)
        # A peer that shrank an exported chunk would kill its owner with SIGBUS. Writing stays allowed.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        for offset in range(0, nbytes, _SLICE_NBYTES):
            os.posix_fallocate(fd, offset, min(_SLICE_NBYTES, nbytes - offset))
    except BaseException:
        os.close(fd)
        raise
    return fd


def reopen(fd: int) -> int:
    """A descriptor of an open file of its own on the same memory, unlike `dup`; see :func:`is_held_elsewhere`."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def require_chunk(fd: int, nbytes: int) -> None:
    """Refuse a descriptor behind which there are not `nbytes` bytes that stay there.

    Raises:
        OSError: it is no open descriptor.
        ValueError: it is no memfd of this size, or one that its owner could shrink under the feet of a reader.
    """
    found = os.fstat(fd).st_size
    if found != nbytes:
        raise ValueError(f"the descriptor has {found} bytes behind it, not {nbytes}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError(f"the descriptor is no memfd: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("the descriptor's memory may be shrunk by others, which would kill its readers")


def is_held_elsewhere(fd: int) -> bool | None:
    """Whether another open file, in any process, or a mapping made through one, holds the memory too.

    Asked by a write lease, which the kernel grants only on a file that nobody else has open (`man 2 fcntl`,
    F_SETLEASE). Not seen are a `dup` of `fd` itself or a forked child's copy, which are the same open file, and pages
    that a device holds. None where the kernel grants no leases at all.
    """
    try:
        # Were the file opened during the lease, the default signal, SIGIO, would kill the process; SIGURG does nothing.
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return True if error.errno == errno.EAGAIN else None
    with contextlib.suppress(OSError):  # a lease that cannot be given up ends when the descriptor is closed
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _new() -> int:
    """A memfd, reopened: the kernel counts no writer for the first descriptor, and leases go by that count."""
    flags = os.MFD_CLOEXEC | _MFD_ALLOW_SEALING
    try:
        first = os.memfd_create(_NAME, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        first = os.memfd_create(_NAME, flags)
    try:
        return reopen(first)
    finally:
        os.close(first)
