"""Free and total memory of the host under the limits of cgroups, old and new, inside containers and outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdkv.memory import MemoryInfo
from pdkv.memory._host_info import memory_info

pytestmark = pytest.mark.cpu

GIB = 1 << 30
OVERHEAD = 16 << 20


class Machine:
    """A procfs and a cgroup tree in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.mount = folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.mount.mkdir()
        (self.proc / "meminfo").write_text("MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\nHuge: 0\n")

    def processes_in(self, cgroup: str, mount: str) -> None:
        (self.proc / "self/cgroup").write_text(f"5:cpu:/elsewhere\n{cgroup}\n")
        (self.proc / "self/mountinfo").write_text(f"30 22 0:26 {mount}\n")

    def version_2(self, path: str, root: str = "/") -> None:
        self.processes_in(f"0::{path}", f"{root} {self.mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw")

    def version_1(self, path: str) -> None:
        self.processes_in(f"4:memory,hugetlb:{path}", f"/ {self.mount} rw - cgroup cgroup rw,memory,hugetlb")

    def limit(self, path: str, **files: str) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    def info(self) -> MemoryInfo:
        return memory_info(self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def _free(room: int) -> int:
    return room - room // 128 - OVERHEAD


def test_without_cgroups_it_is_what_meminfo_says(machine: Machine) -> None:
    assert machine.info() == MemoryInfo(free=32 * GIB, total=64 * GIB)


def test_version_2_bounds_by_the_limit_and_takes_idle_page_cache_for_free(machine: Machine) -> None:
    machine.version_2("/box/job")
    stat = f"anon 1\ninactive_file {2 * GIB}\n"
    machine.limit("box/job", memory__max=f"{8 * GIB}\n", memory__current=f"{5 * GIB}\n", memory__stat=stat)
    assert machine.info() == MemoryInfo(free=_free(5 * GIB), total=8 * GIB)


def test_tighter_limit_of_an_ancestor_counts(machine: Machine) -> None:
    machine.version_2("/box/job")
    machine.limit("box/job", memory__max="max\n", memory__current=f"{GIB}\n", memory__stat="")
    machine.limit("box", memory__max=f"{4 * GIB}\n", memory__current=f"{3 * GIB}\n", memory__stat="")
    assert machine.info() == MemoryInfo(free=_free(GIB), total=4 * GIB)


def test_version_1_bounds_by_its_own_files(machine: Machine) -> None:
    machine.version_1("/job")
    machine.limit(
        "job",
        memory__limit_in_bytes=f"{6 * GIB}\n",
        memory__usage_in_bytes=f"{4 * GIB}\n",
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    )
    machine.limit("", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="0\n")
    assert machine.info() == MemoryInfo(free=_free(3 * GIB), total=6 * GIB)


@pytest.mark.parametrize("path", ["/docker/abc", "/../outside", "/not/mounted/here"])
def test_container_that_sees_only_its_own_part_is_bounded_by_it(machine: Machine, path: str) -> None:
    machine.version_2(path, root="/docker/abc")
    machine.limit("", memory__max=f"{2 * GIB}\n", memory__current=f"{GIB}\n", memory__stat="")
    assert machine.info() == MemoryInfo(free=_free(GIB), total=2 * GIB)


def test_cgroup_that_is_over_its_limit_has_nothing_free(machine: Machine) -> None:
    machine.version_2("/job")
    machine.limit("job", memory__max=f"{GIB}\n", memory__current=f"{2 * GIB}\n", memory__stat="")
    assert machine.info().free == 0


def test_limit_above_the_machine_changes_nothing(machine: Machine) -> None:
    machine.version_2("/job")
    machine.limit("job", memory__max=f"{999 * GIB}\n", memory__current="0\n", memory__stat="")
    assert machine.info() == MemoryInfo(free=32 * GIB, total=64 * GIB)
