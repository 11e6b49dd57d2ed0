"""Workers that take memory which nothing else knows of. For `worker_cls`, by names that are made when asked for.

``Ballast…`` workers hold memory on one rank: `PDKV_TEST_BALLAST` is "RANK:BYTES". ``Greedy…`` workers allocate in
warmup what the profile run did not show, and keep it: `PDKV_TEST_WARMUP_BYTES`. The rest of the name is that of one of
pdkv's workers without ``Growable``, or ``StockGPUWorker``.
"""

from __future__ import annotations

import os
from typing import Any

import torch


class Ballast:
    """Mixed in before a worker class."""

    rank: int
    device: torch.device

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        rank, nbytes = (int(number) for number in os.environ["PDKV_TEST_BALLAST"].split(":"))
        if self.rank == rank:
            self._ballast = torch.ones(nbytes, dtype=torch.uint8, device=self.device)


class Greedy:
    """Mixed in before a worker class."""

    device: torch.device

    def compile_or_warm_up_model(self) -> Any:
        nbytes = int(os.environ["PDKV_TEST_WARMUP_BYTES"])
        self._kept = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        return super().compile_or_warm_up_model()  # type: ignore[misc]


def __getattr__(name: str) -> Any:
    mixin = next((mixin for mixin in (Ballast, Greedy) if name.startswith(mixin.__name__)), None)
    if mixin is None:
        raise AttributeError(name)
    made = type(name, (mixin, _base(name.removeprefix(mixin.__name__))), {})
    globals()[name] = made
    return made


def _base(name: str) -> type:
    """Each needs a vLLM that was built for its device."""
    if name == "StockGPUWorker":
        from vllm.v1.worker.gpu_worker import Worker

        return Worker
    from pdkv_connectors.vllm import worker

    base: type = getattr(worker, "Growable" + name)
    return base
