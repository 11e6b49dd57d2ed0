"""Conformance suites for what others can plug into pdkv, and what they are made of. Needs no test framework.

`check_driver` and its parts, `DRIVER_CHECKS`, are for memory drivers; `check_transport`, `TRANSPORT_CHECKS` and
`TransportBench` are for transports.
"""

from __future__ import annotations

from pdkv.testing.drivers import DRIVER_CHECKS, check_driver, run_driver_check
from pdkv.testing.rules import BrokenRuleError
from pdkv.testing.transports import TRANSPORT_CHECKS, TransportBench, check_transport, run_transport_check

__all__ = [
    "BrokenRuleError",
    "DRIVER_CHECKS",
    "TRANSPORT_CHECKS",
    "TransportBench",
    "check_driver",
    "check_transport",
    "run_driver_check",
    "run_transport_check",
]
