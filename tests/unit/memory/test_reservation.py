"""What a reservation does when all goes well, and what it refuses. Failures: test_reservation_transactions.py."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from pdkv.errors import CapacityError, OutOfMemoryError, StateError
from pdkv.memory import HostDriver, LimitedDriver, Piece, Reservation

pytestmark = pytest.mark.cpu

G = 64 << 10


@pytest.fixture
def reservation(driver: HostDriver) -> Reservation:
    return Reservation(driver, 16 * G)


def sizes(reservation: Reservation) -> list[tuple[int, int]]:
    """What the operating system says is mapped, in granules."""
    return [((chunk.address - reservation.address) // G, chunk.nbytes // G) for chunk in reservation.chunks()]


def fill(reservation: Reservation, offset: int, granules: int, value: int) -> None:
    reservation.tensor(offset * G, granules * G).fill_(value)


def values(reservation: Reservation, offset: int, granules: int) -> list[set[int]]:
    """The byte values found in each granule."""
    tensor = reservation.tensor(offset * G, granules * G).view(granules, G)
    return [set(row.unique().tolist()) for row in tensor]


def test_I1_address_and_views_stay_through_everything(reservation: Reservation) -> None:
    address = reservation.address
    view = reservation.tensor(0, 16 * G)
    reservation.add([Piece(0, G)])
    reservation.replace([Piece(0, 4 * G)])
    reservation.replace_preserving(Piece(0, 4 * G), Piece(0, 6 * G))
    reservation.release()
    reservation.add([Piece(0, 2 * G)])
    assert reservation.address == address
    assert view.data_ptr() == address
    fill(reservation, 0, 2, 3)
    assert int(view[2 * G - 1]) == 3
    del view
    reservation.close()


def test_I2_new_memory_reads_zero_also_where_old_memory_was(reservation: Reservation) -> None:
    reservation.add([Piece(0, 2 * G), Piece(4 * G, G)])
    assert values(reservation, 0, 2) == [{0}, {0}]
    fill(reservation, 0, 2, 9)
    reservation.replace([Piece(0, 3 * G)])
    assert values(reservation, 0, 3) == [{0}] * 3
    fill(reservation, 0, 3, 9)
    reservation.release()
    reservation.add([Piece(0, 3 * G)])
    assert values(reservation, 0, 3) == [{0}] * 3
    reservation.close()


def test_I3_growth_keeps_contents_and_epoch(reservation: Reservation) -> None:
    reservation.add([Piece(0, G)])
    fill(reservation, 0, 1, 5)
    reservation.add([Piece(G, 2 * G), Piece(8 * G, G)])
    assert values(reservation, 0, 2) == [{5}, {0}]
    assert reservation.epoch == 0
    reservation.close()


def test_first_replace_of_an_empty_reservation_leaves_the_epoch(reservation: Reservation) -> None:
    reservation.replace([Piece(0, G)])
    assert reservation.epoch == 0
    reservation.replace([Piece(0, G)])
    assert reservation.epoch == 1
    reservation.release()
    assert reservation.epoch == 2
    reservation.release()
    assert reservation.epoch == 2
    reservation.close()


def test_I4_chunks_are_what_the_system_says(reservation: Reservation) -> None:
    reservation.add([Piece(0, G), Piece(G, G), Piece(4 * G, 2 * G)])
    assert sizes(reservation) == [(0, 1), (1, 1), (4, 2)]
    assert reservation.pieces == (Piece(0, G), Piece(G, G), Piece(4 * G, 2 * G))
    assert reservation.physical_bytes == 4 * G
    reservation.replace([Piece(0, 2 * G), Piece(4 * G, 2 * G)])
    assert sizes(reservation) == [(0, 2), (4, 2)]
    assert reservation.chunks(3 * G, 0) == ()
    reservation.close()


def test_preserving_copies_the_backed_prefix_and_zeroes_the_rest(reservation: Reservation) -> None:
    reservation.add([Piece(0, G), Piece(G, 2 * G), Piece(4 * G, G), Piece(8 * G, G)])
    for offset, granules, value in ((0, 1, 1), (1, 2, 2), (4, 1, 4), (8, 1, 8)):
        fill(reservation, offset, granules, value)
    reservation.replace_preserving(Piece(0, 8 * G), Piece(0, 6 * G))
    assert sizes(reservation) == [(0, 6), (8, 1)]
    assert values(reservation, 0, 6) == [{1}, {2}, {2}, {0}, {0}, {0}], "a hole at granule 3 ends the prefix"
    assert values(reservation, 8, 1) == [{8}], "other regions stay"
    assert reservation.epoch == 1
    reservation.close()


def test_preserving_may_shrink_in_the_middle_of_a_chunk(reservation: Reservation) -> None:
    reservation.add([Piece(2 * G, G), Piece(3 * G, 4 * G)])
    fill(reservation, 2, 5, 7)
    reservation.replace_preserving(Piece(2 * G, 8 * G), Piece(2 * G, 3 * G))
    assert sizes(reservation) == [(2, 3)]
    assert values(reservation, 2, 3) == [{7}] * 3
    reservation.close()


def test_preserving_an_empty_region_is_growth(reservation: Reservation) -> None:
    reservation.replace_preserving(Piece(4 * G, 4 * G), Piece(4 * G, 2 * G))
    assert sizes(reservation) == [(4, 2)]
    assert values(reservation, 4, 2) == [{0}, {0}]
    assert reservation.epoch == 0
    reservation.close()


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece(1, G)],
        [Piece(0, G + 1)],
        [Piece(0, 0)],
        [Piece(-G, G)],
        [Piece(0, -G)],
        [Piece(16 * G, G)],
        [Piece(15 * G, 2 * G)],
        [Piece(0, 2 * G), Piece(G, G)],
    ],
)
def test_pieces_that_cannot_be_are_a_capacity_error(reservation: Reservation, pieces: list[Piece]) -> None:
    with pytest.raises(CapacityError):
        reservation.add(pieces)
    with pytest.raises(CapacityError):
        reservation.replace(pieces)
    assert reservation.physical_bytes == 0
    reservation.close()


def test_adding_over_mapped_memory_is_a_state_error(reservation: Reservation) -> None:
    reservation.add([Piece(G, 2 * G)])
    for piece in (Piece(0, 2 * G), Piece(2 * G, G), Piece(0, 16 * G)):
        with pytest.raises(StateError, match="mapped already"):
            reservation.add([piece])
    assert sizes(reservation) == [(1, 2)]
    reservation.close()


def test_preserving_refuses_regions_that_cut_chunks(reservation: Reservation) -> None:
    reservation.add([Piece(0, 4 * G), Piece(8 * G, G)])
    with pytest.raises(StateError, match="partly outside"):
        reservation.replace_preserving(Piece(0, 2 * G), Piece(0, 2 * G))
    with pytest.raises(StateError, match="mapped already"):
        reservation.replace_preserving(Piece(0, 4 * G), Piece(0, 9 * G))
    with pytest.raises(CapacityError, match="make them equal"):
        reservation.replace_preserving(Piece(0, 4 * G), Piece(G, 2 * G))
    reservation.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (-1, 2), (0, 16 * G + 1), (16 * G, 1), (4, -1)])
def test_views_outside_are_a_capacity_error(reservation: Reservation, offset: int, nbytes: int) -> None:
    with pytest.raises(CapacityError):
        reservation.tensor(offset, nbytes)
    reservation.close()


@pytest.mark.parametrize("nbytes", [0, -G, G + 1, G // 2])
def test_reservation_of_no_whole_granules_is_a_capacity_error(driver: HostDriver, nbytes: int) -> None:
    with pytest.raises(CapacityError, match="multiple"):
        Reservation(driver, nbytes)


def test_I7_short_memory_says_what_was_wanted_and_free_before_anything_changes(driver: HostDriver) -> None:
    limited = LimitedDriver(driver, 8 * G)
    reservation = Reservation(limited, 32 * G)
    reservation.add([Piece(0, 4 * G)])
    fill(reservation, 0, 4, 6)
    with pytest.raises(OutOfMemoryError, match=f"{6 * G} bytes wanted, {4 * G} free") as short:
        reservation.add([Piece(8 * G, 3 * G), Piece(16 * G, 3 * G)])
    assert (short.value.wanted, short.value.free) == (6 * G, 4 * G)
    with pytest.raises(OutOfMemoryError, match=f"{9 * G} bytes wanted") as short:
        reservation.replace([Piece(0, 9 * G)])
    assert (short.value.wanted, short.value.free) == (9 * G, 4 * G)
    with pytest.raises(OutOfMemoryError):
        reservation.replace_preserving(Piece(0, 8 * G), Piece(0, 5 * G))
    assert sizes(reservation) == [(0, 4)]
    assert values(reservation, 0, 4) == [{6}] * 4
    assert reservation.epoch == 0
    reservation.add([Piece(8 * G, 4 * G)])
    reservation.close()
    assert limited.used == 0


def test_replace_without_room_for_old_and_new_releases_the_old_first(driver: HostDriver) -> None:
    limited = LimitedDriver(driver, 8 * G)
    reservation = Reservation(limited, 8 * G)
    reservation.add([Piece(0, 3 * G), Piece(4 * G, 3 * G)])
    reservation.replace([Piece(0, 8 * G)])
    assert sizes(reservation) == [(0, 8)]
    assert limited.used == 8 * G
    reservation.close()


def test_I8_release_gives_back_what_nobody_else_holds(reservation: Reservation) -> None:
    reservation.add([Piece(0, 2 * G), Piece(2 * G, G)])
    report = reservation.release()
    assert (report.released, report.given_back, report.pinned) == (3 * G, 3 * G, 0)
    assert sizes(reservation) == []
    assert reservation.physical_bytes == 0
    reservation.close()


def _map_and_close(fd: int) -> Callable[[], None]:
    import mmap

    mapping = mmap.mmap(fd, 2 * G)
    os.close(fd)
    return mapping.close


def _send_away(fd: int) -> Callable[[], None]:
    left, right = socket.socketpair()
    socket.send_fds(left, [b"chunk"], [fd])
    os.close(fd)

    def drop() -> None:
        left.close()
        right.close()

    return drop


@pytest.mark.parametrize("peer", [lambda fd: lambda: os.close(fd), _map_and_close, _send_away])
def test_I8_what_a_peer_pins_is_reported(reservation: Reservation, peer: Callable[[int], Callable[[], None]]) -> None:
    """A peer pins a chunk by a descriptor, by a mapping alone, or by a descriptor that is still on its way."""
    reservation.add([Piece(0, 2 * G), Piece(4 * G, G)])
    (_, fd), (_, other) = reservation.export_fds()
    os.close(other)
    let_go = peer(fd)
    report = reservation.release()
    assert (report.released, report.given_back, report.pinned) == (3 * G, G, 2 * G)
    let_go()
    reservation.add([Piece(0, 2 * G)])
    assert reservation.release().pinned == 0
    reservation.close()


def test_I8_a_driver_that_cannot_tell_is_judged_by_its_free_memory(driver: HostDriver) -> None:
    class Vague(LimitedDriver):
        """As a GPU's driver: only free memory tells; `kept` bytes stay with a peer."""

        kept = 0

        def is_pinned(self, chunk: object) -> bool | None:
            return None

        def release(self, chunk):  # type: ignore[no-untyped-def]
            super().release(chunk)
            self.used += self.kept

    vague = Vague(driver, 64 * G)
    reservation = Reservation(vague, 16 * G)
    reservation.add([Piece(0, 4 * G)])
    assert reservation.release().given_back == 4 * G
    reservation.add([Piece(0, 4 * G)])
    vague.kept = 3 * G
    report = reservation.release()
    assert (report.given_back, report.pinned) == (G, 3 * G)
    reservation.close()


def test_exporting_leaves_no_descriptor_open_when_it_fails(driver: HostDriver, held: Callable[[], object]) -> None:
    from pdkv.errors import DriverError
    from pdkv.memory import FailingDriver

    failing = FailingDriver(driver)
    reservation = Reservation(failing, 4 * G)
    reservation.add([Piece(0, G), Piece(G, G), Piece(2 * G, G)])
    before = held()
    failing.fail("export_fd", nth=3)
    with pytest.raises(DriverError):
        reservation.export_fds()
    assert held() == before
    reservation.close()
