"""From what a workload really used to the margins that would have held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdkv.kvcache.sizing_constants import GIB, MIB, SizingConstants

FRACTIONS = (0.0, 0.02, 0.1, 0.2, 0.45, 0.75, 1.0)
FLOORS = (0, 64 * MIB, 150 * MIB, 256 * MIB, 512 * MIB, 1 * GIB)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What sizing knew after warmup, in bytes: memory in use by all but the KV cache, and a step's need beyond it."""

    resident_bytes: int
    transient_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Point:
    """One load: `concurrency` requests at once of `prompt_tokens` and `output_tokens`, and the peak that it reached.

    `peak_bytes` is the highest use by all but the KV cache while it ran.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    peak_bytes: int
    seconds: float

    def needed_margin(self, baseline: Baseline) -> int:
        """Bytes that had to be free beyond the transient peak that warmup had shown; 0 where warmup showed it all."""
        return max(0, self.peak_bytes - baseline.resident_bytes - baseline.transient_peak_bytes)


def margin_bytes(floor_bytes: int, fraction: float, transient_peak_bytes: int) -> int:
    """The margin of :func:`pdkv.kvcache.sizing.measure_kv_cache_bytes`."""
    return max(floor_bytes, int(fraction * transient_peak_bytes))


def fit(
    baseline: Baseline,
    points: Sequence[Point],
    constants: SizingConstants,
    *,
    proved_margin_bytes: int | None = None,
    fractions: Sequence[float] = FRACTIONS,
    floors: Sequence[int] = FLOORS,
) -> dict[str, Any]:
    """The report: the margin needed, the smallest floor for each fraction, the smallest fraction for each floor.

    Args:
        proved_margin_bytes: a margin with which the whole workload ran under a cap; it is taken where it is smaller
            than what the peaks say, since an allocator may hold more than it needs.
    """
    peak = baseline.transient_peak_bytes
    seen = max((point.needed_margin(baseline) for point in points), default=0)
    needed = seen if proved_margin_bytes is None else min(seen, proved_margin_bytes)
    default = margin_bytes(constants.margin_floor_bytes, constants.margin_fraction, peak)
    return {
        "baseline": asdict(baseline),
        "points": [{**asdict(point), "needed_margin_bytes": point.needed_margin(baseline)} for point in points],
        "seen_margin_bytes": seen,
        "proved_margin_bytes": proved_margin_bytes,
        "needed_margin_bytes": needed,
        "default_margin_bytes": default,
        "default_holds": default >= needed,
        "smallest_floor_bytes_for_fraction": [
            {"fraction": fraction, "floor_bytes": 0 if int(fraction * peak) >= needed else needed}
            for fraction in fractions
        ],
        "smallest_fraction_for_floor_bytes": [
            {"floor_bytes": floor, "fraction": _smallest_fraction(floor, needed, peak)} for floor in floors
        ],
    }


def _smallest_fraction(floor_bytes: int, needed_bytes: int, peak_bytes: int) -> float | None:
    """None where no fraction is enough, because warmup showed no transient peak at all."""
    if floor_bytes >= needed_bytes:
        return 0.0
    return needed_bytes / peak_bytes if peak_bytes else None


__all__ = ["FLOORS", "FRACTIONS", "Baseline", "Point", "fit", "margin_bytes"]
