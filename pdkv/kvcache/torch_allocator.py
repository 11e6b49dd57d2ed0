"""What sizing needs of torch's device allocator: a clean reading after warmup, and a cap afterwards."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdkv.kvcache.sizing import transient_peak
from pdkv.kvcache.sizing_constants import GIB, SizingConstants

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchReading:
    """Memory of one CUDA or ROCm device, in bytes, with torch's cache emptied.

    `free` and `total` are the driver's. `allocated` is live in torch now, `peak_allocated` the most that was live since
    :func:`start_warmup_reading`. `reserved` is what torch holds of the device.
    """

    free: int
    total: int
    allocated: int
    peak_allocated: int
    reserved: int

    def transient_peak(self, profiled_activation_bytes: int = 0) -> int:
        """See :func:`pdkv.kvcache.sizing.transient_peak`."""
        return transient_peak(
            profiled_activation_bytes=profiled_activation_bytes,
            warmup_allocated_peak_bytes=self.peak_allocated,
            resident_allocated_bytes=self.allocated,
        )


def start_warmup_reading(device: torch.device | int) -> None:
    """Forget earlier peaks. Call before warmup."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)


def read_torch(device: torch.device | int) -> TorchReading:
    """Wait for the device, empty torch's cache, and read. Call after warmup, before the final size is decided."""
    import torch

    torch.cuda.synchronize(device)
    gc.collect()
    # Segments that torch keeps for reuse would be counted as needed by the driver's free memory.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return TorchReading(
        free=free,
        total=total,
        allocated=torch.cuda.memory_allocated(device),
        peak_allocated=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
    )


def cap_fraction(*, free: int, total: int, reserved: int, reserve_bytes: int) -> float:
    """The share of the device that torch may hold, in (0, 1]: what it holds plus what is free beyond the reserve."""
    allowed = max(reserved, reserved + free - reserve_bytes)
    return min(1.0, max(allowed, 1) / total)


def cap_torch_allocator(device: torch.device | int, constants: SizingConstants) -> float:
    """Cap torch's allocator once the KV cache has its final size; returns the share of the device that it may hold.

    At the cap torch first gives back cached segments, and only then fails; without one it takes the memory that NCCL, a
    transport or a kernel's workspace needs next. `non_torch_reserve_bytes` stays free for those. The cap counts torch's
    memory only, never the KV cache's (measured on an H200: `set_per_process_memory_fraction` does not limit
    `cuMemCreate`), so it needs no change when the cache is released and committed again; a weight update lifts it with
    :func:`uncap_torch_allocator`.
    """
    import torch

    now = read_torch(device)
    share = cap_fraction(
        free=now.free, total=now.total, reserved=now.reserved, reserve_bytes=constants.non_torch_reserve_bytes
    )
    torch.cuda.set_per_process_memory_fraction(share, device)
    _log.info("torch may hold %.2f GiB of the device (%.4f of it)", share * now.total / GIB, share)
    return share


def uncap_torch_allocator(device: torch.device | int) -> None:
    """Lift the cap."""
    import torch

    torch.cuda.set_per_process_memory_fraction(1.0, device)


__all__ = [
    "TorchReading",
    "cap_fraction",
    "cap_torch_allocator",
    "read_torch",
    "start_warmup_reading",
    "uncap_torch_allocator",
]
