"""Conformance suites for what others can plug into pdkv, and what they are made of. Needs no test framework.

`check_driver` and its parts, `DRIVER_CHECKS`, are for memory drivers; `check_transport`, `TRANSPORT_CHECKS` and
`TransportBench` are for transports; `check_connector`, `CONNECTOR_CHECKS` and `ConnectorBench` are for what registers a
KV cache and lives through sleep and wake.
"""

from __future__ import annotations

from pdkv.testing.connectors import CONNECTOR_CHECKS, ConnectorBench, check_connector, run_connector_check
from pdkv.testing.drivers import DRIVER_CHECKS, check_driver, run_driver_check
from pdkv.testing.rules import BrokenRuleError
from pdkv.testing.transports import TRANSPORT_CHECKS, TransportBench, check_transport, run_transport_check

__all__ = [
    "BrokenRuleError",
    "CONNECTOR_CHECKS",
    "ConnectorBench",
    "DRIVER_CHECKS",
    "TRANSPORT_CHECKS",
    "TransportBench",
    "check_connector",
    "check_driver",
    "check_transport",
    "run_connector_check",
    "run_driver_check",
    "run_transport_check",
]
