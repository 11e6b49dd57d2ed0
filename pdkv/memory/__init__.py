"""Where the bytes live: drivers that hand out memory, reservations that are backed in parts, views over them."""

from __future__ import annotations

import importlib
import logging

from pdkv.errors import ConfigError, DriverError, DriverUnavailableError
from pdkv.memory.driver import MappedChunk, MemoryDriver, MemoryInfo, PhysicalChunk, Progress
from pdkv.memory.host import DEFAULT_GRANULE, HostDriver
from pdkv.memory.imported import ImportedMemory
from pdkv.memory.reservation import Piece, ReleaseReport, Reservation
from pdkv.memory.wrappers import CountingDriver, FailingDriver, ForwardingDriver, LimitedDriver

logger = logging.getLogger(__name__)

_GPU_DRIVERS = {"cuda": ("pdkv.memory.cuda", "CudaDriver"), "hip": ("pdkv.memory.hip", "HipDriver")}
_NAMES = (*_GPU_DRIVERS, "host")


def open_driver(name: str = "auto", *, device: int = 0, granule: int | None = None) -> MemoryDriver:
    """Open a memory driver.

    Args:
        name: "cuda", "hip", "host", or "auto": the first of these, in this order, that can reserve addresses and commit
            one granule of memory.
        device: device number; the host has number 0 only.
        granule: smallest chunk in bytes, for the host only (2 MiB unless given); a GPU's driver sets its own.

    Raises:
        ConfigError: an unknown name, or an argument that the driver does not take.
        DriverUnavailableError: the driver cannot work on this machine; for "auto" the message lists why none can.
    """
    if name != "auto" and name not in _NAMES:
        raise ConfigError(f"there is no memory driver {name!r}; choose auto, {', '.join(_NAMES)}")
    if granule is not None and name != "host":
        raise ConfigError(f"only the host driver takes a granule, not {name!r}; leave it out or ask for 'host'")
    if name != "auto":
        return _open(name, device, granule)
    return _open_first(device)


def _open(name: str, device: int, granule: int | None) -> MemoryDriver:
    if name == "host":
        if device != 0:
            raise ConfigError(f"the host has device 0 only, not {device}")
        return HostDriver(DEFAULT_GRANULE if granule is None else granule)
    module_name, class_name = _GPU_DRIVERS[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise DriverUnavailableError(f"the {name} driver needs the module {error.name}, which is missing") from error
    driver: MemoryDriver = getattr(module, class_name)(device)
    return driver


def _open_first(device: int) -> MemoryDriver:
    passed_over = []
    for name in _NAMES:
        try:
            driver = _open(name, device, None)
            _commit_one_granule(driver)
        except (DriverError, ConfigError) as error:
            passed_over.append(f"{name}: {error}")
            continue
        logger.info("memory driver %s; passed over: %s", name, "; ".join(passed_over) or "none")
        return driver
    raise DriverUnavailableError(f"no memory driver works on this machine. {'; '.join(passed_over)}")


def _commit_one_granule(driver: MemoryDriver) -> None:
    reservation = Reservation(driver, driver.granule)
    try:
        reservation.add([Piece(0, driver.granule)])
    finally:
        reservation.close()


__all__ = [
    "CountingDriver",
    "DEFAULT_GRANULE",
    "FailingDriver",
    "ForwardingDriver",
    "HostDriver",
    "ImportedMemory",
    "LimitedDriver",
    "MappedChunk",
    "MemoryDriver",
    "MemoryInfo",
    "PhysicalChunk",
    "Piece",
    "Progress",
    "ReleaseReport",
    "Reservation",
    "open_driver",
]
