"""The sweep with a random-weight model in torch: what a step's allocator traffic needs beyond what warmup showed.

On CUDA the peak is what the process holds of the device: torch's segments, cached ones included, and all beside them.
That is more than it needs, since at its cap torch gives cached segments back first. So the smallest margin is then
searched for by running the whole workload under a cap, the one that :mod:`pdkv.kvcache.torch_allocator` sets.
On the CPU, for dry runs, the peak is that of the process, and nothing is capped.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from pdkv.kvcache.sizing_constants import MIB
from pdkv.memory.process import process_memory
from pdkv.sizing.engine_sweep import Load
from pdkv.sizing.fit import Baseline, Point
from pdkv.sizing.torch_model import ModelShape, RandomDecoder
from pdkv.sizing.watch import PrivatePeak

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

RESOLUTION_BYTES = 32 * MIB
#: Equal steps in a row that are run. The allocator meets the same requests in each of them: the first may take new
#: memory, the next show whether what it left is used again, and more of them show nothing.
EQUAL_STEPS = 4


class Peak(Protocol):
    nbytes: int


def steps_of(load: Load, max_num_batched_tokens: int) -> Iterator[list[int]]:
    """Tokens a sequence in each step of a scheduler with chunked prefill: prompts first, then one token each."""
    left = [load.prompt_tokens] * load.concurrency
    while any(left):
        budget, step = max_num_batched_tokens, []
        for index, tokens in enumerate(left):
            taken = min(tokens, budget)
            left[index], budget = tokens - taken, budget - taken
            if taken:
                step.append(taken)
        yield step
    for _ in range(load.output_tokens):
        yield [1] * load.concurrency


def telling_steps(load: Load, max_num_batched_tokens: int) -> Iterator[list[int]]:
    """:func:`steps_of` without repetition: of equal steps in a row no more than :data:`EQUAL_STEPS`."""
    for _, equal in itertools.groupby(steps_of(load, max_num_batched_tokens)):
        yield from itertools.islice(equal, EQUAL_STEPS)


def sweep_torch(
    shape: ModelShape,
    device: str,
    loads: Sequence[Load],
    *,
    max_num_batched_tokens: int,
    warmup_seqs: int,
    say: Callable[[str], None],
) -> tuple[Baseline, tuple[Point, ...], int | None]:
    """Warm up as an engine does, with a full batch of tokens and a step of `warmup_seqs` requests, then run all loads.

    Returns:
        What sizing would know, a point for each load, and the smallest margin under which all of it ran; None on the
        CPU.
    """
    model = RandomDecoder(shape, device)
    meter = _CudaMeter(model) if model.device.type == "cuda" else _HostMeter()
    with meter.watch() as peak:
        model.step([max_num_batched_tokens])
        model.step([1] * warmup_seqs)
    baseline = meter.baseline(peak)
    resident, transient = baseline.resident_bytes / MIB, baseline.transient_peak_bytes / MIB
    say(f"after warmup: {resident:.0f} MiB resident, transient peak {transient:.0f} MiB")
    points = tuple(_run(model, meter, load, max_num_batched_tokens, say) for load in loads)
    if not isinstance(meter, _CudaMeter):
        return baseline, points, None
    seen = max(point.needed_margin(baseline) for point in points)

    def holds(margin: int) -> bool:
        return _holds(model, baseline, loads, max_num_batched_tokens, margin, say)

    return baseline, points, smallest_that_holds(seen, holds)


def smallest_that_holds(enough: int, holds: Callable[[int], bool], resolution: int = RESOLUTION_BYTES) -> int:
    """The least multiple of `resolution` that holds, by bisection, where more always holds too; `enough` at most."""
    low, high = -1, -(-enough // resolution)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle * resolution) else (middle, high)
    return min(high * resolution, enough)


def _run(
    model: RandomDecoder, meter: _CudaMeter | _HostMeter, load: Load, budget: int, say: Callable[[str], None]
) -> Point:
    began = time.monotonic()
    with meter.watch() as peak:
        for step in telling_steps(load, budget):
            model.step(step)
    point = Point(load.prompt_tokens, load.output_tokens, load.concurrency, peak.nbytes, time.monotonic() - began)
    say(f"{load.concurrency} x {load.prompt_tokens} tokens: peak {point.peak_bytes / MIB:.0f} MiB")
    return point


def _holds(
    model: RandomDecoder,
    baseline: Baseline,
    loads: Sequence[Load],
    budget: int,
    margin: int,
    say: Callable[[str], None],
) -> bool:
    import torch

    from pdkv.kvcache.torch_allocator import read_torch, uncap_torch_allocator

    now = read_torch(model.device)
    beside_torch = now.total - now.free - now.reserved
    allowed = baseline.resident_bytes + baseline.transient_peak_bytes + margin - beside_torch
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / now.total), model.device)
    try:
        for load in loads:
            for step in telling_steps(load, budget):
                model.step(step)
    except torch.OutOfMemoryError:
        say(f"margin {margin / MIB:.0f} MiB: out of memory")
        return False
    finally:
        uncap_torch_allocator(model.device)
    say(f"margin {margin / MIB:.0f} MiB: holds")
    return True


class _CudaMeter:
    """What this process holds of the device. Nobody else may use the device meanwhile."""

    def __init__(self, model: RandomDecoder) -> None:
        self._device = model.device

    def watch(self) -> AbstractContextManager[Peak]:
        return _CudaPeak(self)

    def baseline(self, peak: Peak) -> Baseline:
        from pdkv.kvcache.torch_allocator import read_torch

        now = read_torch(self._device)
        return Baseline(now.total - now.free, now.transient_peak())

    def held(self) -> int:
        """The most that was held since the last reset: torch's highest, and all beside torch now."""
        import torch

        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        beside = total - free - torch.cuda.memory_reserved(self._device)
        return int(beside + torch.cuda.max_memory_reserved(self._device))

    def reset(self) -> None:
        from pdkv.kvcache.torch_allocator import start_warmup_reading

        start_warmup_reading(self._device)


class _CudaPeak:
    def __init__(self, meter: _CudaMeter) -> None:
        self._meter = meter
        self.nbytes = 0

    def __enter__(self) -> _CudaPeak:
        self._meter.reset()
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = self._meter.held()


class _HostMeter:
    """Resident memory of this process."""

    def watch(self) -> AbstractContextManager[Peak]:
        return PrivatePeak(os.getpid())

    def baseline(self, peak: Peak) -> Baseline:
        gc.collect()
        resident = process_memory().private
        return Baseline(resident, max(0, peak.nbytes - resident))


__all__ = ["smallest_that_holds", "steps_of", "sweep_torch", "telling_steps"]
