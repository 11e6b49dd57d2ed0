"""Exhaustion on the host with the real limits of the kernel, each in a process of its own.

What is real here: `ulimit -n`, `ulimit -f` (a memfd is a file), `ulimit -v`, vm.max_map_count, and, where the test may
make cgroups, a memory cgroup. Running the machine itself out of memory is left out: it would take others with it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

Run = Callable[..., "subprocess.CompletedProcess[str]"]

BEGINNING = """
import resource, sys
from pdkv.errors import *
from pdkv.memory import *
granule = 64 << 10
driver = HostDriver(granule)

def fill(reservation, step=granule):
    "Add chunks until it fails; return how many were added and the error."
    for count in range(reservation.nbytes // step):
        try:
            reservation.add([Piece(count * step, step)])
        except PdkvError as error:
            return count, error
    raise SystemExit("the limit was never met")
"""

ENDING = """
assert len(reservation.chunks()) == count, (len(reservation.chunks()), count)
reservation.tensor(0, granule).fill_(1)
report = reservation.release()
assert report.pinned == 0 and report.given_back == report.released, report
reservation.add([Piece(0, granule)])
reservation.close()
print(type(error).__name__, error)
"""


def _check_said(run: subprocess.CompletedProcess[str], error: str, *words: str) -> None:
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{error} ")
    for word in words:
        assert word in run.stdout


def test_I7_descriptors_run_out_with_a_clear_error_and_earlier_chunks_stay(run_python: Run) -> None:
    program = f"""{BEGINNING}
import torch
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
reservation = Reservation(driver, 200 * granule)
count, error = fill(reservation)
assert 30 < count < 64, count
{ENDING}"""
    _check_said(run_python(program), "DriverError", "ulimit -n", "defragment")


def test_I7_mappings_run_out_with_a_clear_error_and_earlier_chunks_stay(run_python: Run) -> None:
    # Every other page made inaccessible gives two mappings a page, without a descriptor for each.
    program = f"""{BEGINNING}
import torch
from pdkv.memory import _host_info, _libc
reservation = Reservation(driver, 8000 * granule)
room = _host_info.max_mappings() - _host_info.count_mappings()
flags = _libc.MAP_PRIVATE | _libc.MAP_ANONYMOUS | _libc.MAP_NORESERVE
filler = _libc.mmap(None, 2 * room * 4096, _libc.PROT_NONE, flags)
for page in range(0, room - 2000, 2):
    _libc.mmap(filler + page * 4096, 4096, _libc.PROT_READ_WRITE, flags | _libc.MAP_FIXED)
count, error = fill(reservation)
assert 100 < count < 1500, count
_libc.munmap(filler, 2 * room * 4096)
{ENDING}"""
    _check_said(run_python(program), "DriverError", "vm.max_map_count")


def test_I7_descriptors_that_run_out_half_way_through_one_call_leave_nothing_of_it(run_python: Run) -> None:
    program = f"""{BEGINNING}
import os, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
reservation = Reservation(driver, 200 * granule)
reservation.add([Piece(0, granule)])
count, before = 1, sorted(os.listdir("/proc/self/fd"))
try:
    reservation.add([Piece(2 * index * granule, granule) for index in range(1, 90)])
except DriverError as refusal:
    error = refusal
assert sorted(os.listdir("/proc/self/fd")) == before
assert reservation.physical_bytes == granule
{ENDING}"""
    _check_said(run_python(program), "DriverError", "ulimit -n")


def test_I7_mappings_that_run_out_half_way_through_one_call_leave_nothing_of_it(run_python: Run) -> None:
    program = f"""{BEGINNING}
import torch
from pdkv.memory import _host_info, _libc
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
reservation = Reservation(driver, 8000 * granule)
reservation.add([Piece(0, granule)])
count, held = 1, reservation.physical_bytes
room = _host_info.max_mappings() - _host_info.count_mappings()
flags = _libc.MAP_PRIVATE | _libc.MAP_ANONYMOUS | _libc.MAP_NORESERVE
filler = _libc.mmap(None, 2 * room * 4096, _libc.PROT_NONE, flags)
for page in range(0, room - 2000, 2):
    _libc.mmap(filler + page * 4096, 4096, _libc.PROT_READ_WRITE, flags | _libc.MAP_FIXED)
try:
    reservation.add([Piece(2 * index * granule, granule) for index in range(1, 1500)])
except DriverError as refusal:
    error = refusal
assert reservation.physical_bytes == held
_libc.munmap(filler, 2 * room * 4096)
{ENDING}"""
    _check_said(run_python(program), "DriverError", "vm.max_map_count")


def test_I7_chunk_beyond_the_file_size_limit_is_a_clear_error(run_python: Run) -> None:
    program = f"""{BEGINNING}
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * granule, 2 * granule))
reservation = Reservation(driver, 8 * granule)
reservation.add([Piece(0, 2 * granule)])
count = 1
try:
    reservation.add([Piece(2 * granule, granule), Piece(4 * granule, 4 * granule)])
except DriverError as refusal:
    error = refusal
{ENDING}"""
    _check_said(run_python(program), "DriverError", "ulimit -f")


def test_reserving_beyond_the_address_space_limit_is_a_clear_error(run_python: Run) -> None:
    program = f"""{BEGINNING}
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    Reservation(driver, 1 << 40)
except DriverError as error:
    print(type(error).__name__, error)
Reservation(driver, granule).close()
"""
    _check_said(run_python(program), "DriverError", "ulimit -v")


LIMIT = 256 << 20


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A fresh memory cgroup with a limit of 256 MiB; the file to write a process id into."""
    top = Path("/sys/fs/cgroup")
    version_2 = (top / "cgroup.subtree_control").exists() and "memory" in (top / "cgroup.subtree_control").read_text()
    folder = (top if version_2 else top / "memory") / f"pdkv-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(LIMIT))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"may not make memory cgroups here: {error}")
    yield folder / "cgroup.procs"
    folder.rmdir()


@pytest.mark.parametrize("step", [64 << 10, 2 << 20, 96 << 20])
def test_I7_cgroup_limit_is_an_error_and_the_process_lives(run_python: Run, cgroup: Path, step: int) -> None:
    program = f"""{BEGINNING}
import os, torch
from pathlib import Path
procs = Path(sys.argv[1])
procs.write_text(str(os.getpid()))
info = driver.memory_info()
assert info.total == {LIMIT} and 0 < info.free < {LIMIT}, info
step = int(sys.argv[2])
reservation = Reservation(driver, {2 * LIMIT} // step * step)
count, error = fill(reservation, step)
held = count * step
assert held > {LIMIT} * 0.5, held
assert error.wanted == step and error.free < step, (error.wanted, error.free)
reservation.tensor(0, held).fill_(3)
assert driver.memory_info().free < step + (4 << 20), driver.memory_info()
{ENDING}
assert driver.memory_info().free > held - step - (8 << 20), (driver.memory_info(), held)
(procs.parent.parent / "cgroup.procs").write_text(str(os.getpid()))
"""
    _check_said(run_python(program, str(cgroup), str(step)), "OutOfMemoryError", "bytes wanted", "free")
