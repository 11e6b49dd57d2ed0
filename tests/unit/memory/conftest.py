"""What the tests of pdkv.memory count by: descriptors, mappings and processes, as the kernel shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdkv.memory import HostDriver

GRANULE = 64 << 10


@pytest.fixture
def granule() -> int:
    return GRANULE


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    opened = HostDriver(GRANULE)
    yield opened
    opened.close()


class Held:
    """Descriptors and mappings of pdkv's chunks that this process holds now."""

    def __init__(self) -> None:
        names = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:  # the listing's own descriptor, closed by now
                continue
        self.fds = sum("memfd:pdkv-chunk" in name for name in names)
        self.mappings = Path("/proc/self/maps").read_text().count("memfd:pdkv-chunk")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and (self.fds, self.mappings) == (other.fds, other.mappings)

    def __repr__(self) -> str:
        return f"Held(fds={self.fds}, mappings={self.mappings})"


@pytest.fixture
def held() -> Callable[[], Held]:
    return Held


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program text in a Python of its own and return what became of it."""

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run
