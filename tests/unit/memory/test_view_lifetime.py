"""I9: closing is idempotent, nothing leaks, and no order in which views and owners die crashes anything."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pdkv.errors import DriverError, StateError
from pdkv.memory import FailingDriver, HostDriver, Piece, Reservation, _host_info

pytestmark = pytest.mark.cpu

G = 64 << 10
SIZE = 1 << 32  # large enough to be seen as one range of its own

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _reserved(address: int) -> bool:
    """Whether the address belongs to some mapping of the process, with or without memory."""
    return any(part.start <= address < part.end for part in _host_info.mappings())


def test_I9_close_is_idempotent_and_leaves_nothing(driver: HostDriver, held: Callable[[], object]) -> None:
    before = held()
    for _ in range(20):
        reservation = Reservation(driver, SIZE)
        reservation.add([Piece(0, G), Piece(4 * G, G)])
        reservation.tensor(0, G).fill_(1)
        reservation.replace([Piece(0, 2 * G)])
        reservation.replace_preserving(Piece(0, 4 * G), Piece(0, 4 * G))
        reservation.close()
        reservation.close()
    assert held() == before
    assert not _reserved(reservation.address)


def test_I9_closed_reservation_refuses_everything_but_close(driver: HostDriver) -> None:
    reservation = Reservation(driver, 4 * G)
    reservation.close()
    for call in (
        lambda: reservation.add([]),
        lambda: reservation.replace([]),
        lambda: reservation.replace_preserving(Piece(0, G), Piece(0, G)),
        lambda: reservation.release(),
        lambda: reservation.chunks(),
        lambda: reservation.export_fds(),
        lambda: reservation.tensor(0, G),
    ):
        with pytest.raises(StateError, match="closed"):
            call()
    assert reservation.physical_bytes == 0


def test_I9_addresses_stay_reserved_until_the_last_view_has_died(
    driver: HostDriver, held: Callable[[], object]
) -> None:
    before = held()
    reservation = Reservation(driver, SIZE)
    reservation.add([Piece(0, G)])
    address = reservation.address
    view = reservation.tensor(0, G)
    other = reservation.tensor(8 * G, 8 * G)[G:].view(7, G)
    reservation.close()
    assert held() == before, "the memory is released at once"
    del view
    assert _reserved(address)
    del other
    gc.collect()
    assert not _reserved(address)


def test_I9_last_view_may_die_in_another_thread_while_the_driver_works(driver: HostDriver) -> None:
    busy = Reservation(driver, 64 * G)
    for _ in range(20):
        reservation = Reservation(driver, SIZE)
        reservation.add([Piece(0, G)])
        views = [reservation.tensor(0, G)]
        address = reservation.address
        reservation.close()
        del reservation
        thread = threading.Thread(target=views.clear)
        thread.start()
        for index in range(64):
            busy.add([Piece(index * G, G)])
        busy.release()
        thread.join(timeout=60)
        assert not _reserved(address)
    busy.close()


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        (lambda view: view()[G], IndexError),
        (lambda view: int(view()), ValueError),
        (lambda view: torch.empty(3).copy_(view()), RuntimeError),
        (lambda view: len([view()], "one too many"), TypeError),
    ],
    ids=["index", "conversion", "call of torch", "list"],
)
def test_I9_an_exception_goes_on_when_the_last_view_dies_under_it(
    driver: HostDriver,
    fails: Callable[[Callable[[], torch.Tensor]], object],
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    reservation = Reservation(driver, SIZE)
    reservation.add([Piece(0, G)])
    address, views = reservation.address, [reservation.tensor(0, G)]
    reservation.close()
    del reservation
    with pytest.raises(error):
        fails(views.pop)
    assert not _reserved(address), "its owner was let go of"
    assert ignored == []


def test_I9_views_keep_a_forgotten_reservation_alive(driver: HostDriver, held: Callable[[], object]) -> None:
    before = held()
    reservation = Reservation(driver, SIZE)
    reservation.add([Piece(0, G)])
    address, views = reservation.address, [reservation.tensor(0, G)]
    del reservation
    gc.collect()
    views[0].fill_(5)
    assert int(views[0].sum()) == 5 * G
    with pytest.warns(ResourceWarning, match="never closed"):
        views.clear()
    assert held() == before
    assert not _reserved(address)


def test_I9_close_that_fails_can_be_tried_again(held: Callable[[], object]) -> None:
    before = held()
    for kind in ("unmap", "release", "unreserve"):
        driver = FailingDriver(HostDriver(G))
        reservation = Reservation(driver, SIZE)
        reservation.add([Piece(0, G), Piece(G, G)])
        driver.fail(kind)
        with pytest.raises(DriverError, match=f"{kind} was refused"):
            reservation.close()
        reservation.close()
        assert not _reserved(reservation.address)
    assert held() == before


def test_I9_driver_may_be_closed_before_its_reservations(held: Callable[[], object]) -> None:
    before = held()
    driver = HostDriver(G)
    reservation = Reservation(driver, SIZE)
    reservation.add([Piece(0, G)])
    view = reservation.tensor(0, G)
    driver.close()
    reservation.close()
    del view
    gc.collect()
    assert held() == before
    assert not _reserved(reservation.address)


EXITS = {
    "view in a global, reservation open": "view = reservation.tensor(0, G)",
    "view in a global, reservation closed": "view = reservation.tensor(0, G); reservation.close()",
    "reservation open, no view": "",
    "driver closed first": "view = reservation.tensor(0, G); driver.close()",
    "view in a cycle": "box = [reservation.tensor(0, G)]; box.append(box)",
    "view that a module keeps": "import torch; torch.kept = reservation.tensor(0, G)",
    "view that nobody can free": """
import ctypes
view = reservation.tensor(0, G)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(view))""",
    "view in a thread that still runs": """
import threading
started = threading.Event()
def hold(view=reservation.tensor(0, G)):
    started.set()
    threading.Event().wait(60)
threading.Thread(target=hold, daemon=True).start()
started.wait(60)""",
    "view that dies in atexit": """
import atexit
views = [reservation.tensor(0, G)]
reservation.close()
atexit.register(views.clear)""",
    "view made in atexit": """
import atexit
import torch
atexit.register(lambda: globals().update(late=reservation.tensor(0, G)))""",
    "views of all kinds": """
view = reservation.tensor(0, G)
derived = view.view(2, -1)[1]
storage = view.untyped_storage()
array = view.numpy()
autograd = view.float().requires_grad_()""",
}


@pytest.fixture(scope="module")
def exits(run_python: Run) -> dict[str, subprocess.CompletedProcess[str]]:
    """How each interpreter ended; as many at a time as there are cores, since most of their time is torch's import."""

    def end(what: str) -> subprocess.CompletedProcess[str]:
        return run_python(f"""
from pdkv.memory import HostDriver, Piece, Reservation
G = 64 << 10
driver = HostDriver(G)
reservation = Reservation(driver, 1 << 32)
reservation.add([Piece(0, G)])
{what}
print("done")
""")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(EXITS, pool.map(end, EXITS.values()), strict=True))


@pytest.mark.parametrize("what", EXITS)
def test_I9_interpreter_exits_cleanly_whatever_is_alive(
    exits: dict[str, subprocess.CompletedProcess[str]], what: str
) -> None:
    run = exits[what]
    assert run.returncode == 0, run.stderr
    assert run.stdout == "done\n"
    assert "Exception ignored" not in run.stderr, run.stderr
