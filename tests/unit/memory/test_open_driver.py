"""Which driver is opened, and what is said when none can be."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

import pdkv
from pdkv import memory
from pdkv.errors import ConfigError, DriverUnavailableError
from pdkv.memory import FailingDriver, HostDriver, MemoryDriver, open_driver

pytestmark = pytest.mark.cpu


def test_host_by_name_takes_a_granule() -> None:
    assert open_driver("host").granule == 2 << 20
    assert open_driver("host", granule=4096).granule == 4096
    assert pdkv.open_driver is open_driver


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "cpu"}, "choose auto, cuda, hip, host"),
        ({"name": "host", "device": 1}, "device 0 only"),
        ({"name": "host", "granule": 5000}, "power of two"),
        ({"name": "auto", "granule": 4096}, "only the host driver takes a granule"),
        ({"name": "cuda", "granule": 4096}, "only the host driver takes a granule"),
    ],
)
def test_arguments_that_cannot_be_are_a_config_error(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_driver(**arguments)  # type: ignore[arg-type]


def _opens(name: str, drivers: dict[str, Callable[[], MemoryDriver]]) -> MemoryDriver:
    if name in drivers:
        return drivers[name]()
    raise DriverUnavailableError(f"no {name} on this machine")


def _refusing(kind: str) -> MemoryDriver:
    driver = FailingDriver(HostDriver(4096))
    driver.fail(kind, times=100)
    return driver


def test_auto_passes_over_drivers_that_open_but_cannot_commit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, held: Callable[[], object]
) -> None:
    before = held()
    drivers: dict[str, Callable[[], MemoryDriver]] = {"hip": lambda: _refusing("map"), "host": lambda: HostDriver(4096)}
    monkeypatch.setattr(memory, "_open", lambda name, device, granule: _opens(name, drivers))
    caplog.set_level("INFO", "pdkv.memory")
    assert isinstance(open_driver("auto"), HostDriver)
    assert "passed over: cuda: no cuda on this machine; hip: map was refused" in caplog.text
    assert held() == before


def test_auto_says_why_each_driver_was_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    drivers: dict[str, Callable[[], MemoryDriver]] = {
        "hip": lambda: _refusing("reserve"),
        "host": lambda: _refusing("create"),
    }
    monkeypatch.setattr(memory, "_open", lambda name, device, granule: _opens(name, drivers))
    with pytest.raises(DriverUnavailableError) as error:
        open_driver("auto")
    assert str(error.value).endswith(
        "cuda: no cuda on this machine; hip: reserve was refused, on order; host: create was refused, on order"
    )


def test_importing_pdkv_and_opening_a_driver_imports_no_torch(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    program = """
import sys
import pdkv
driver = pdkv.open_driver("host")
from pdkv.memory import Piece, Reservation
reservation = Reservation(driver, driver.granule)
reservation.add([Piece(0, driver.granule)])
reservation.close()
assert "torch" not in sys.modules
"""
    run = run_python(program)
    assert run.returncode == 0, run.stderr
