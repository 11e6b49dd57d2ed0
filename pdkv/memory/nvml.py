"""Who else uses a CUDA device, as NVML tells it. Optional: the package nvidia-ml-py (module `pynvml`)."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from pdkv.errors import DriverUnavailableError

_MIB = 1 << 20
#: Memory in use that no visible process accounts for, from which on somebody hidden uses the device. An idle H100 with
#: a driver in persistence mode shows less than 10 MiB beside what NVML counts as reserved; a CUDA context takes some
#: 500 MiB.
_HIDDEN_USE_BYTES = 256 * _MIB


def other_processes(uuid: str, nvml: Any = None) -> tuple[str, ...]:
    """A description of each process but this one that uses the device; ask before this process uses it.

    In a container NVML often shows no process of another container, but their memory in use: that counts as one
    process whose id is not known.

    Args:
        uuid: of the device, with or without NVML's prefix ``GPU-``.
        nvml: the module to ask; None imports `pynvml`.

    Raises:
        DriverUnavailableError: NVML is not installed, or does not answer for this device.
    """
    nvml = nvml or _import_nvml()
    try:
        nvml.nvmlInit()
        try:
            return _others(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise DriverUnavailableError(f"NVML cannot say who uses the device {uuid}: {error}.") from error


def _others(nvml: Any, handle: Any) -> tuple[str, ...]:
    found = {
        process.pid: process.usedGpuMemory or 0
        for list_processes in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses)
        for process in _listed(nvml, list_processes, handle)
    }
    own = found.pop(os.getpid(), None)
    others = [f"process {pid} with {nbytes // _MIB} MiB" for pid, nbytes in sorted(found.items())]
    used = int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
    if not others and own is None and used > _HIDDEN_USE_BYTES:
        others.append(f"one that is not visible from here, with {used // _MIB} MiB")
    return tuple(others)


def _listed(nvml: Any, list_processes: Any, handle: Any) -> list[Any]:
    """Nobody where NVML may not list processes, as in some sandboxes; their memory is seen all the same."""
    try:
        return list(list_processes(handle))
    except nvml.NVMLError:
        return []


def _import_nvml() -> Any:
    try:
        return import_module("pynvml")
    except ImportError as error:
        raise DriverUnavailableError(
            "NVML's Python module is not installed, so nobody knows who else uses the device; install nvidia-ml-py."
        ) from error


__all__ = ["other_processes"]
