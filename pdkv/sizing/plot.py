"""The sweep as a picture. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdkv.kvcache.sizing_constants import MIB
from pdkv.picture import axes_saved_to


def save_plot(report: dict[str, Any], path: str | Path) -> None:
    """Write the needed margin over prompt length, one line a concurrency; the ending of `path` chooses the format.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written in that format.
    """
    points = report["points"]
    with axes_saved_to(path) as axes:
        for concurrency in sorted({point["concurrency"] for point in points}):
            line = sorted(
                (point["prompt_tokens"], point["needed_margin_bytes"] / MIB)
                for point in points
                if point["concurrency"] == concurrency
            )
            axes.plot(*zip(*line, strict=True), marker="o", label=f"{concurrency} at once")
        axes.axhline(
            report["needed_margin_bytes"] / MIB, linestyle=":", color="0.3", label="smallest margin that holds"
        )
        axes.axhline(report["default_margin_bytes"] / MIB, linestyle="--", color="0.3", label="margin of the constants")
        axes.set_xlabel("prompt length, tokens")
        axes.set_ylabel("needed beyond warmup's peak, MiB")
        axes.set_title(report["workload"])


__all__ = ["save_plot"]
