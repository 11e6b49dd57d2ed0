"""What the host driver does beyond the contract: its limits, its errors, its sharing, forks."""

from __future__ import annotations

import mmap
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pdkv.errors import ConfigError, DriverError, StateError
from pdkv.memory import HostDriver, PhysicalChunk, Piece, Progress, Reservation, _host_info, _libc

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("granule", [0, -4096, 1024, 3 << 20, 4097])
def test_granule_that_is_no_power_of_two_of_pages_is_a_config_error(granule: int) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        HostDriver(granule)


def test_granule_is_2_mib_unless_told_otherwise() -> None:
    assert HostDriver().granule == 2 << 20


def test_reservation_of_a_tebibyte_takes_no_memory_and_one_mapping(driver: HostDriver) -> None:
    before = _host_info.count_mappings()
    address = driver.reserve(1 << 40)
    assert _host_info.count_mappings() <= before + 1
    status = Path("/proc/self/smaps").read_text().split(f"{address:x}-")
    driver.unreserve(address, 1 << 40)
    # The kernel may join the range with a neighbour, but nothing of a PROT_NONE range is ever resident.
    if len(status) > 1:
        resident = next(line for line in status[1].splitlines() if line.startswith("Rss:"))
        assert int(resident.split()[1]) == 0


def test_mapping_fills_the_pages_so_that_first_touch_cannot_fail(driver: HostDriver, granule: int) -> None:
    address = driver.reserve(granule)
    chunk = driver.create(granule)
    assert os.fstat(chunk.handle).st_blocks * 512 == granule, "create allocates every page"
    driver.map(address, chunk)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pagemap = _present_pages(address, granule)
    assert pagemap == granule // mmap.PAGESIZE, "map fills every page table entry"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < granule // mmap.PAGESIZE
    _drop(driver, address, granule, chunk)


def _written_by_mapping(driver: HostDriver, chunk: PhysicalChunk, granule: int) -> None:
    address = driver.reserve(granule)
    driver.map(address, chunk)
    driver.tensor(address, granule, driver).fill_(5)
    driver.unmap(address, granule)
    driver.unreserve(address, granule)


def _written_by_a_peer(driver: HostDriver, chunk: PhysicalChunk, granule: int) -> None:
    fd = driver.export_fd(chunk)
    os.pwrite(fd, b"\5" * granule, 0)
    os.close(fd)


@pytest.mark.parametrize("write", [_written_by_mapping, _written_by_a_peer])
def test_I2_a_chunk_that_somebody_may_have_written_reads_zero_when_it_backs_again(
    driver: HostDriver, granule: int, write: Callable[[HostDriver, PhysicalChunk, int], None]
) -> None:
    chunk = driver.create(granule)
    write(driver, chunk, granule)
    address = driver.reserve(granule)
    driver.back([(address, granule)], Progress([chunk]))
    assert not driver.tensor(address, granule, driver).any()
    _drop(driver, address, granule, chunk)


def test_I2_a_descriptor_that_was_seen_untouched_before_vouches_for_no_later_chunk(
    driver: HostDriver, granule: int
) -> None:
    driver.release(driver.create(granule))
    chunk = driver.create(granule)  # the kernel gives the lowest free descriptor, the one that has just been closed
    _written_by_mapping(driver, chunk, granule)
    address = driver.reserve(granule)
    driver.back([(address, granule)], Progress([chunk]))
    assert not driver.tensor(address, granule, driver).any()
    _drop(driver, address, granule, chunk)


def test_I2_memory_that_was_given_back_reads_zero_when_it_comes_again(driver: HostDriver, granule: int) -> None:
    reservation = Reservation(driver, 4 * granule)
    for _ in range(3):
        reservation.add([Piece(0, granule), Piece(2 * granule, 2 * granule)])
        for piece in reservation.pieces:
            view = reservation.tensor(piece.offset, piece.nbytes)
            assert not view.any()
            view.fill_(9)
        reservation.release()
    reservation.close()


def _present_pages(address: int, nbytes: int) -> int:
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        entries = file.read(nbytes // mmap.PAGESIZE * 8)
    return sum(entries[index + 7] >> 7 for index in range(0, len(entries), 8))  # bit 63: present


def _drop(driver: HostDriver, address: int, nbytes: int, chunk: object) -> None:
    driver.unmap(address, nbytes)
    driver.release(chunk)  # type: ignore[arg-type]
    driver.unreserve(address, nbytes)


def test_kernel_without_populate_still_has_every_page_at_map(
    driver: HostDriver, granule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old_kernel(address: int, nbytes: int, advice: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(_libc, "madvise", old_kernel)
    address, chunk = driver.reserve(granule), driver.create(granule)
    driver.map(address, chunk)
    assert os.fstat(chunk.handle).st_blocks * 512 == granule
    assert driver.describe()["backing"] == "fallocate"
    _drop(driver, address, granule, chunk)


def test_populate_that_fails_leaves_nothing_mapped(
    driver: HostDriver, granule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(address: int, nbytes: int, advice: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    address, chunk = driver.reserve(granule), driver.create(granule)
    with monkeypatch.context() as patch:
        patch.setattr(_libc, "madvise", exhausted)
        with pytest.raises(MemoryError):
            driver.map(address, chunk)
    assert driver.query_chunks(address, granule) == ()
    driver.map(address, chunk)
    _drop(driver, address, granule, chunk)


def test_mapping_that_the_kernel_split_is_still_one_chunk(driver: HostDriver, granule: int) -> None:
    reservation = Reservation(driver, 4 * granule)
    reservation.add([Piece(0, 4 * granule)])
    _libc.madvise(reservation.address + granule, granule, 10)  # MADV_DONTFORK, as RDMA libraries give it
    whole = reservation.chunks()
    assert [chunk.nbytes for chunk in whole] == [4 * granule]
    assert reservation.chunks(3 * granule) == whole, "a part of the range shows the same whole chunk"
    reservation.close()


def test_exported_chunk_is_the_same_memory_and_cannot_be_shrunk(driver: HostDriver, granule: int) -> None:
    reservation = Reservation(driver, granule)
    reservation.add([Piece(0, granule)])
    ((piece, fd),) = reservation.export_fds()
    assert piece == Piece(0, granule)
    with mmap.mmap(fd, granule) as peer:
        peer[5] = 77
        assert reservation.tensor(0, granule)[5] == 77
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    reservation.close()


def test_chunks_are_closed_on_exec(driver: HostDriver, granule: int) -> None:
    chunk = driver.create(granule)
    exported = driver.export_fd(chunk)
    assert not os.get_inheritable(chunk.handle)
    assert not os.get_inheritable(exported)
    os.close(exported)
    driver.release(chunk)


def _in_forked_child(action: Callable[[], bool]) -> int:
    """Run the action in a child and return its wait status."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if action() else 1)
    return os.waitpid(pid, 0)[1]


def test_forked_child_holds_no_chunk_and_cannot_use_the_driver(driver: HostDriver, granule: int) -> None:
    reservation = Reservation(driver, 2 * granule)
    reservation.add([Piece(0, granule)])

    def child_is_free_of_it() -> bool:
        chunks = [part for part in _host_info.mappings() if part.inode and part.start == reservation.address]
        try:
            driver.create(granule)
        except StateError:
            return not chunks
        return False

    assert os.waitstatus_to_exitcode(_in_forked_child(child_is_free_of_it)) == 0
    reservation.tensor(0, granule).fill_(1)
    assert reservation.release().pinned == 0
    reservation.close()


def test_forked_child_faults_rather_than_write_into_the_cache(driver: HostDriver, granule: int) -> None:
    reservation = Reservation(driver, granule)
    reservation.add([Piece(0, granule)])
    view = reservation.tensor(0, granule)

    def write() -> bool:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        view[0] = 1
        return True

    assert os.waitstatus_to_exitcode(_in_forked_child(write)) == -signal.SIGSEGV
    assert view[0] == 0
    reservation.close()


def test_closed_driver_refuses_new_memory(driver: HostDriver, granule: int) -> None:
    driver.close()
    with pytest.raises(StateError, match="closed"):
        driver.reserve(granule)
    with pytest.raises(StateError, match="closed"):
        driver.create(granule)


def test_ranges_of_another_driver_are_refused(driver: HostDriver, granule: int) -> None:
    other = HostDriver(granule)
    address, chunk = other.reserve(granule), other.create(granule)
    with pytest.raises(DriverError, match="not a chunk of this driver"):
        driver.release(chunk)
    with pytest.raises(DriverError, match="no reservation of this driver"):
        driver.tensor(address, granule, None)
    other.release(chunk)
    other.unreserve(address, granule)


@pytest.mark.parametrize("nbytes", [1 << 64, (1 << 64) + (2 << 20), 1 << 70])
def test_a_reservation_of_more_than_64_bits_is_refused_and_not_cut_to_its_lower_ones(nbytes: int) -> None:
    with pytest.raises(DriverError, match="cannot reserve"):
        HostDriver().reserve(nbytes)
