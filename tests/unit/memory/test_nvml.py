"""Who else uses a device. The module that answers for NVML is a stand-in: no machine without a GPU has one."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from pdkv.errors import DriverUnavailableError
from pdkv.memory.nvml import other_processes

pytestmark = pytest.mark.cpu

MIB = 1 << 20


class StandIn:
    """As much of `pynvml` as is asked for."""

    nvmlMemory_v2 = 2
    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, processes: dict[int, int | None] | None = None, used: int = 0, may_list: bool = True) -> None:
        self.processes = processes or {}
        self.may_list = may_list
        self.used = used
        self.asked: list[str] = []
        self.initialised = 0

    def nvmlInit(self) -> None:
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self.initialised -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        if "unknown" in uuid:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        if not self.may_list:
            raise self.NVMLError("Insufficient Permissions")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        return []

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int) -> Any:
        return SimpleNamespace(used=self.used)


def test_other_processes_are_named_with_their_memory_and_this_one_is_not() -> None:
    nvml = StandIn({os.getpid(): 900 * MIB, 7: 2048 * MIB, 8: None}, used=3000 * MIB)
    assert other_processes("ab", nvml) == ("process 7 with 2048 MiB", "process 8 with 0 MiB")
    assert nvml.asked == ["GPU-ab"]
    assert nvml.initialised == 0


def test_memory_that_no_visible_process_holds_means_somebody_hidden() -> None:
    assert other_processes("ab", StandIn(used=5 * MIB)) == ()
    assert other_processes("ab", StandIn(used=700 * MIB)) == ("one that is not visible from here, with 700 MiB",)


def test_where_processes_may_not_be_listed_their_memory_still_shows() -> None:
    nvml = StandIn({7: 2048 * MIB}, used=2100 * MIB, may_list=False)
    assert other_processes("ab", nvml) == ("one that is not visible from here, with 2100 MiB",)


def test_a_device_that_nvml_does_not_know_is_said_and_nvml_is_left() -> None:
    nvml = StandIn()
    with pytest.raises(DriverUnavailableError, match=r"unknown.*Not Found"):
        other_processes("GPU-unknown", nvml)
    assert nvml.initialised == 0


def test_without_nvml_the_message_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(DriverUnavailableError, match="nvidia-ml-py"):
        other_processes("ab")
