"""Pictures of one pair of axes. Needs matplotlib, which is imported when a picture is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError


@contextmanager
def axes_saved_to(path: str | Path) -> Iterator[Any]:
    """Axes of a new figure, which is written when the block ends; the ending of `path` chooses png, svg or pdf.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written in that format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; install it, or use --json and plot the values") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    yield axes
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot write the plot to {path}: {error}; name a writable .png, .svg or .pdf") from error
