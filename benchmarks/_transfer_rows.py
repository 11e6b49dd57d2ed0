"""Rows of the table of transfers: what was timed, what it is compared with, and what it must reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from _report import format_nbytes, format_time


@dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
        seconds: the median of the repeats.
        reference: name of the row that it is compared with; None where the target is a time, or where this is one.
        ratio: what is compared with the target; None for references.
        target: what `ratio` must reach; None for references, and where nothing is promised.
        at_least: whether more is better.
        nbytes: bytes moved; 0 where that says nothing.
    """

    name: str
    seconds: float
    reference: str | None = None
    ratio: float | None = None
    target: float | None = None
    at_least: bool = False
    nbytes: int = 0
    best: float = 0.0
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the target is reached; true where there is none."""
        if self.target is None or self.ratio is None:
            return True
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    def as_json(self) -> dict[str, Any]:
        """All fields, `ok` and the rate."""
        rate = self.nbytes / self.seconds / 1e9 if self.nbytes else None
        return {**vars(self), "ok": self.ok, "gbps": rate}

    def cells(self) -> list[str]:
        """For a table with :data:`HEADINGS`."""
        rate = f"{self.nbytes / self.seconds / 1e9:.4g}" if self.nbytes else "-"
        sign = ">=" if self.at_least else "<="
        return [
            self.name,
            format_nbytes(self.nbytes) if self.nbytes else "-",
            format_time(self.seconds),
            rate,
            self.reference or "-",
            "-" if self.ratio is None else f"{self.ratio:.3g}",
            "-" if self.target is None else f"{sign} {self.target:.3g}",
            "ok" if self.ok else "MISSED",
        ]


HEADINGS = ("what", "bytes", "median", "GB/s", "compared with", "ratio", "target", "")


def reference(name: str, times: Sequence[float], nbytes: int = 0, note: str = "") -> Row:
    """A row that others are compared with."""
    return Row(name, statistics.median(times), nbytes=nbytes, best=min(times), note=note)


def within(name: str, times: Sequence[float], limit_s: float, nbytes: int = 0) -> Row:
    """A row that must not take longer than a limit."""
    median = statistics.median(times)
    return Row(
        name, median, ratio=median / limit_s, target=1.0, nbytes=nbytes, best=min(times), note=f"limit {limit_s:g} s"
    )


def bandwidth_share(
    name: str, times: Sequence[float], other: Row, target: float | None, nbytes: int, note: str = ""
) -> Row:
    """A row that must reach a share of another row's bandwidth."""
    median = statistics.median(times)
    ratio = nbytes / median / (other.nbytes / other.seconds)
    return Row(name, median, other.name, ratio, target, True, nbytes, min(times), note)


def time_ratio(
    name: str, times: Sequence[float], other: Row, target: float | None, nbytes: int = 0, note: str = ""
) -> Row:
    """A row that must not take much longer than another one."""
    median = statistics.median(times)
    return Row(name, median, other.name, median / other.seconds, target, False, nbytes, min(times), note)


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Times of each call, taken in turn, so that a machine that is busy for a while is busy for all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warmup + repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if number >= warmup:
                times[name].append(time.perf_counter() - began)
    return times
