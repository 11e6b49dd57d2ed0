"""I7: whatever call of the driver fails, earlier memory stays usable, and the operation can be tried again.

First every single call of every operation fails in turn; then hypothesis mixes operations and failures freely.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdkv.errors import DriverError, OutOfMemoryError, PdkvError
from pdkv.memory import CountingDriver, FailingDriver, HostDriver, LimitedDriver, Piece, Reservation
from pdkv.memory.wrappers import CALL_KINDS, out_of_memory

pytestmark = pytest.mark.cpu

G = 4096
LENGTH = 16

OPERATIONS: dict[str, Callable[[Reservation], object]] = {
    "add": lambda r: r.add([Piece(8 * G, G), Piece(10 * G, 2 * G), Piece(13 * G, G)]),
    "replace": lambda r: r.replace([Piece(0, 3 * G), Piece(4 * G, 2 * G)]),
    "replace_preserving": lambda r: r.replace_preserving(Piece(0, 4 * G), Piece(0, 5 * G)),
    "release": lambda r: r.release(),
}


def _state(reservation: Reservation) -> tuple[object, object]:
    """Mappings as the operating system shows them, idents included, and the contents."""
    return reservation.chunks(), [reservation.tensor(p.offset, p.nbytes).tolist() for p in reservation.pieces]


def _filled(driver: FailingDriver) -> Reservation:
    reservation = Reservation(driver, LENGTH * G)
    reservation.add([Piece(0, G), Piece(G, 2 * G), Piece(6 * G, G)])
    for piece in reservation.pieces:
        reservation.tensor(piece.offset, piece.nbytes).fill_(piece.offset // G + 1)
    return reservation


def _calls_of(operation: Callable[[Reservation], object]) -> dict[str, int]:
    counting = CountingDriver(HostDriver(G))
    reservation = _filled(FailingDriver(counting))
    counting.calls.clear()
    operation(reservation)
    calls = dict(counting.calls)
    reservation.close()
    return calls


_KINDS = ["reserve", "create", "map", "unmap", "zero", "zero_all", "back", "copy", "memory_info", "is_pinned"]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("kind", _KINDS)
def test_I7_each_call_that_fails_changes_nothing_and_can_be_tried_again(
    kind: str, operation: Callable[[Reservation], object], held: Callable[[], object]
) -> None:
    before_all = held()
    for nth in range(1, _calls_of(operation).get(kind, 0) + 1):
        driver = FailingDriver(HostDriver(G))
        reservation = _filled(driver)
        before, epoch = _state(reservation), reservation.epoch
        driver.fail(kind, nth)
        with pytest.raises(DriverError, match="on order"):
            operation(reservation)
        assert _state(reservation) == before
        assert reservation.epoch == epoch
        operation(reservation)
        reservation.close()
    assert held() == before_all


def test_I7_a_piece_that_the_driver_alone_refuses_leaves_nothing_of_the_others(held: Callable[[], object]) -> None:
    """The host's own call for many pieces, refused at each position: somebody else has mapped a chunk there."""
    driver = HostDriver(G)
    before = held()
    pieces = [Piece(offset * G, 2 * G) for offset in (0, 2, 8, 12)]
    for taken in pieces:
        reservation = Reservation(driver, LENGTH * G)
        chunk = driver.create(G)
        driver.map(reservation.address + taken.offset + G, chunk)
        with pytest.raises(DriverError, match="mapped already"):
            reservation.add(pieces)
        assert (reservation.pieces, reservation.physical_bytes) == ((), 0)
        assert len(reservation.chunks()) == 1
        driver.unmap(reservation.address + taken.offset + G, G)
        driver.release(chunk)
        reservation.add(pieces)
        assert reservation.pieces == tuple(pieces)
        reservation.close()
    assert held() == before


def test_I7_replace_that_fails_twice_says_that_contents_were_lost() -> None:
    """No room for old and new at once, and the new cannot be had once the old are gone: old sizes come back, zeroed."""
    driver = FailingDriver(LimitedDriver(HostDriver(G), 8 * G))
    reservation = Reservation(driver, LENGTH * G)
    reservation.add([Piece(0, 2 * G), Piece(2 * G, 4 * G)])
    reservation.tensor(0, 6 * G).fill_(5)
    driver.fail("create", nth=2, error=out_of_memory)
    with pytest.raises(
        OutOfMemoryError, match="the old contents were lost; memory of the old sizes is mapped"
    ) as short:
        reservation.replace([Piece(0, 4 * G), Piece(8 * G, 4 * G)])
    assert short.value.wanted == 8 * G
    assert reservation.pieces == (Piece(0, 2 * G), Piece(2 * G, 4 * G))
    assert len(reservation.chunks()) == 2
    assert not reservation.tensor(0, 6 * G).any()
    assert reservation.epoch == 1
    reservation.replace([Piece(0, 8 * G)])
    reservation.close()


def test_I7_replace_that_can_get_nothing_back_says_so_and_can_be_tried_again() -> None:
    driver = FailingDriver(LimitedDriver(HostDriver(G), 8 * G))
    reservation = Reservation(driver, LENGTH * G)
    reservation.add([Piece(0, 6 * G)])
    driver.fail("map", times=2)
    with pytest.raises(DriverError, match="could not be had again"):
        reservation.replace([Piece(0, 8 * G)])
    assert reservation.chunks() == ()
    assert reservation.pieces == ()
    assert reservation.epoch == 1
    reservation.replace([Piece(0, 8 * G)])
    assert not reservation.tensor(0, 8 * G).any()
    reservation.close()


def test_I7_memory_that_seemed_to_be_free_and_is_not_is_found_in_the_old() -> None:
    driver = FailingDriver(HostDriver(G))
    reservation = _filled(driver)
    driver.fail("create", nth=2, error=out_of_memory)
    reservation.replace([Piece(0, 3 * G), Piece(4 * G, 2 * G)])
    assert driver.failures == 1
    assert reservation.pieces == (Piece(0, 3 * G), Piece(4 * G, 2 * G))
    reservation.close()


@pytest.mark.parametrize("operation", [OPERATIONS[name] for name in ("replace", "replace_preserving", "release")])
def test_chunk_that_the_driver_refuses_to_release_is_released_later(
    operation: Callable[[Reservation], object], held: Callable[[], object]
) -> None:
    before = held()
    limited = LimitedDriver(HostDriver(G), 64 * G)
    driver = FailingDriver(limited)
    reservation = _filled(driver)
    driver.fail("release")
    if operation is OPERATIONS["release"]:
        with pytest.raises(DriverError, match="release was refused"):
            operation(reservation)
        assert reservation.chunks() == ()
    else:
        operation(reservation)
    assert reservation.physical_bytes == limited.used
    reservation.close()
    assert limited.used == 0
    assert held() == before


def test_what_the_driver_refuses_to_take_back_is_given_back_later(held: Callable[[], object]) -> None:
    before = held()
    driver = FailingDriver(HostDriver(G))
    reservation = _filled(driver)
    contents = _state(reservation)[1]
    driver.fail({"zero", "unmap"}, times=2)
    with pytest.raises(DriverError, match="zero was refused"):
        reservation.add([Piece(8 * G, G)])
    assert len(reservation.chunks()) == 4, "the new chunk could not be unmapped"
    assert len(reservation.pieces) == 3, "but nobody is told that it is theirs"
    assert _state(reservation)[1] == contents
    reservation.add([Piece(8 * G, G)])
    assert len(reservation.chunks()) == 4
    reservation.close()
    assert held() == before


pieces = st.builds(lambda offset, n: Piece(offset * G, n * G), st.integers(0, LENGTH - 1), st.integers(1, 6))


class ReservationMachine(RuleBasedStateMachine):
    """Operations and failures in any order, against a model: the chunks, each filled with one value."""

    LIMIT = 20

    @initialize()
    def open(self) -> None:
        self.limited = LimitedDriver(HostDriver(G), self.LIMIT * G)
        self.failing = FailingDriver(self.limited)
        self.reservation = Reservation(self.failing, LENGTH * G)
        self.view = self.reservation.tensor(0, LENGTH * G)
        self.model: dict[Piece, int] = {}
        self.epoch = 0

    def _attempt(self, operation: Callable[[], object], becomes: dict[Piece, int]) -> None:
        """Carry the operation out; the model changes where it worked. A failure must have left the model true."""
        before, failures = self.reservation.epoch, self.failing.failures
        try:
            operation()
        except PdkvError:
            worked = False
        else:
            worked = True
            self.model = becomes
        self.failing.relent()
        self.reservation.add([])  # gives back what a failure left behind
        if not worked and self.reservation.epoch != before:
            assert self.failing.failures > failures, "contents are never lost without a failure of the driver"
            self._learn_what_was_lost()

    def _learn_what_was_lost(self) -> None:
        now = {}
        for piece in self.reservation.pieces:
            values = self.reservation.tensor(piece.offset, piece.nbytes).unique().tolist()
            assert len(values) == 1
            assert values[0] in (0, self.model.get(piece, 0)), "what is left is zero or as it was"
            now[piece] = values[0]
        self.model = now

    @rule(
        kinds=st.sets(
            st.sampled_from(sorted(CALL_KINDS - {"tensor", "query_chunks", "close", "describe"})), min_size=1
        ),
        nth=st.integers(1, 8),
        times=st.integers(1, 4),
        error=st.sampled_from([None, out_of_memory]),
    )
    def order_failure(self, kinds: set[str], nth: int, times: int, error: Callable[[str], Exception] | None) -> None:
        self.failing.fail(kinds, nth, times=times, error=error)

    @rule(new=st.lists(pieces, max_size=4))
    def add(self, new: list[Piece]) -> None:
        self._attempt(lambda: self.reservation.add(new), {**self.model, **dict.fromkeys(new, 0)})

    @rule(new=st.lists(pieces, max_size=4))
    def replace(self, new: list[Piece]) -> None:
        self._attempt(lambda: self.reservation.replace(new), dict.fromkeys(new, 0))

    @rule(data=st.data())
    def replace_preserving(self, data: st.DataObject) -> None:
        """Backs the first chunk and those that follow it without a hole, as far as all have the same value."""
        offset = data.draw(st.integers(0, LENGTH - 1)) * G
        length = data.draw(st.integers(1, LENGTH)) * G
        region, new = Piece(offset, length), Piece(offset, data.draw(st.integers(1, LENGTH)) * G)
        inside = [p for p in sorted(self.model, key=lambda p: p.offset) if offset <= p.offset < offset + length]
        value = self.model[inside[0]] if inside and inside[0].offset == offset else 0
        end = offset
        for piece in inside:
            if piece.offset == end and self.model[piece] == value:
                end = piece.offset + piece.nbytes
        if value and (end < new.offset + new.nbytes or any(p.offset >= end for p in inside)):
            return  # the result would hold several values, which this model cannot say; test_reservation.py does
        rest = {piece: kept for piece, kept in self.model.items() if piece not in inside}
        if any(self.model[p] for p in inside) and not value:
            return
        self._attempt(lambda: self.reservation.replace_preserving(region, new), {**rest, new: value})

    @rule(value=st.integers(1, 100))
    def write(self, value: int) -> None:
        for number, piece in enumerate(sorted(self.model, key=lambda p: p.offset)):
            self.view[piece.offset : piece.offset + piece.nbytes] = (value + number) % 100 + 1
            self.model[piece] = (value + number) % 100 + 1

    @rule()
    def release(self) -> None:
        self._attempt(self.reservation.release, {})

    @invariant()
    def system_shows_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        base = self.reservation.address
        seen = [Piece(chunk.address - base, chunk.nbytes) for chunk in self.limited.query_chunks(base, LENGTH * G)]
        assert seen == sorted(self.model, key=lambda piece: piece.offset) == list(self.reservation.pieces)
        for piece, value in self.model.items():
            assert bool((self.view[piece.offset : piece.offset + piece.nbytes] == value).all())
        assert self.reservation.physical_bytes == self.limited.used == sum(piece.nbytes for piece in self.model)
        assert self.reservation.epoch >= self.epoch
        self.epoch = self.reservation.epoch

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.failing.relent()
            self.reservation.close()
            del self.view
            assert self.limited.used == 0


ReservationMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class TestI7AnyMixOfOperationsAndFailures(ReservationMachine.TestCase):  # type: ignore[misc,name-defined]
    """I7 as a property: the system shows the model after every step, failed or not."""
