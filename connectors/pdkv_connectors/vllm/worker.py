"""The worker classes for vLLM's ``--worker-cls``, by one module path for all devices.

Each joins the growth that is common to all (`growth.GrowableWorker`) to a stock worker, and says what differs by
device: which memory driver, how memory is measured, and which model runner's tensors are rebound. A class is imported
when it is asked for, since vLLM's build for one device lacks what the stock worker of another one needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "GrowableCPUWorker": "pdkv_connectors.vllm.cpu_worker",
    "GrowableGPUWorker": "pdkv_connectors.vllm.gpu_worker",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
