"""What Linux says of its memory: free and total bytes under the cgroup's limit, and what is mapped where."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pdkv.errors import DriverError
from pdkv.memory.driver import MemoryInfo

# A cgroup is also charged for the page tables and index nodes of what it maps, about 0.5 % of it, and for the heap of
# its processes. One that takes the limit's last byte as data is killed for the next small thing it needs, even to
# report an error; so this much of a cgroup is never called free.
_CGROUP_OVERHEAD_DIVISOR = 128
_CGROUP_HEADROOM_NBYTES = 16 << 20
# Version 1 has no word for "no limit": it says the largest whole number of pages, 2^63 - 4096 where pages have 4 KiB.
_CGROUP_V1_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of `/proc/self/maps`. `inode` is 0 for anonymous memory."""

    start: int
    end: int
    file_offset: int
    inode: int


def mappings() -> list[Mapping]:
    """All mappings of the process, in address order."""
    found = []
    for line in _read(Path("/proc/self/maps")).splitlines():
        addresses, _, offset, _, inode, *_ = line.split(maxsplit=5)
        start, _, end = addresses.partition("-")
        found.append(Mapping(int(start, 16), int(end, 16), int(offset, 16), int(inode)))
    return found


def count_mappings() -> int:
    """How many mappings the process has; Linux allows `vm.max_map_count` of them."""
    return _read(Path("/proc/self/maps")).count("\n")


def max_mappings() -> int:
    """The kernel's limit on mappings per process."""
    return int(_read(Path("/proc/sys/vm/max_map_count")))


def memory_info(proc: Path = Path("/proc")) -> MemoryInfo:
    """`MemAvailable` and `MemTotal`, each bounded by the limits of the process's cgroup and of those above it.

    Args:
        proc: where procfs is mounted.
    """
    # Numbers are followed by "kB", which here means KiB.
    meminfo = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines(proc / "meminfo")}
    free, total = meminfo["MemAvailable"], meminfo["MemTotal"]
    for folder, names in _cgroup_folders(proc):
        limit = _number(folder / names.limit)
        if limit is None or limit >= _CGROUP_V1_NO_LIMIT:
            continue
        used = _number(folder / names.usage)
        if used is None:
            continue
        # Page cache that nobody uses counts as usage, but the kernel takes it back before it fails an allocation.
        room = limit - used + _statistic(folder / "memory.stat", names.inactive_file)
        room -= room // _CGROUP_OVERHEAD_DIVISOR + _CGROUP_HEADROOM_NBYTES
        free, total = min(free, max(room, 0)), min(total, limit)
    return MemoryInfo(free=free, total=total)


@dataclass(frozen=True, slots=True)
class _CgroupNames:
    limit: str
    usage: str
    inactive_file: str


_V1 = _CgroupNames("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _CgroupNames("memory.max", "memory.current", "inactive_file")


def _cgroup_folders(proc: Path) -> list[tuple[Path, _CgroupNames]]:
    """The folders of the process's memory cgroup and of its ancestors, with the names of the files in them."""
    folders = []
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        version = _V2 if not controllers else _V1
        if version is _V1 and "memory" not in controllers.split(","):
            continue
        for root, mount_point in _cgroup_mounts(proc, version is _V2):
            # Inside a container the mount shows only a part of the tree, whose top is `root`; a path outside that part
            # begins with "/..".
            inner = Path(path.removeprefix(root.rstrip("/")).strip("/"))
            inside = ".." not in inner.parts and (mount_point / inner).is_dir()
            steps = [mount_point / inner, *(mount_point / step for step in inner.parents)] if inside else [mount_point]
            folders += [(step, version) for step in dict.fromkeys(steps)]
    return folders


@cache
def _cgroup_mounts(proc: Path, unified: bool) -> tuple[tuple[str, Path], ...]:
    """(root inside the hierarchy, mount point) of each mount of the memory controller; `man 5 proc`, mountinfo."""
    found = []
    for line in _lines(proc / "self/mountinfo"):
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if (unified and kind == "cgroup2") or (kind == "cgroup" and not unified and "memory" in options.split(",")):
            fields = left.split()
            found.append((fields[3], Path(fields[4])))
    return tuple(found)


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no such file or it says "max"."""
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    """The lines of a file; none where a kernel or a sandbox has no such file."""
    try:
        return _read(path).splitlines()
    except FileNotFoundError:
        return []


def _read(path: Path) -> str:
    """Raises DriverError where the process has no descriptor left, which is nobody's mistake about the file."""
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise DriverError(f"no file descriptor is left to read {path}; raise `ulimit -n`") from error
        raise
