"""Two processes for the tests of a transport that needs two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from pdkv.testing import TransportBench


def between_processes(factory: str, environment: Mapping[str, str]) -> Callable[..., Any]:
    """A fixture, to be given a name in a test's module: one bench of `factory` for all of that module's tests."""

    @pytest.fixture(scope="module")
    def bench() -> Iterator[TransportBench]:
        with TransportBench(factory, processes=2, environment=dict(environment)) as bench:
            yield bench

    return bench
