"""All checks of transports by name, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable

from pdkv.testing.transports.bench import TransportBench

TRANSPORT_CHECKS: dict[str, Callable[[TransportBench], None]] = {}
"""All checks by the name of their rule."""


def check(function: Callable[[TransportBench], None]) -> Callable[[TransportBench], None]:
    """Make a function a check."""
    TRANSPORT_CHECKS[function.__name__] = function
    return function


def ways(bench: TransportBench) -> list[bool]:
    """READ, WRITE, or both."""
    return [reads for reads, can in ((True, "can_read"), (False, "can_write")) if bench.what[can]]
