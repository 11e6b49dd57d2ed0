"""The conformance suite for transports."""

from __future__ import annotations

from pdkv.testing.transports.bench import TransportBench
from pdkv.testing.transports.checks import TRANSPORT_CHECKS, check_transport, run_transport_check

__all__ = ["TRANSPORT_CHECKS", "TransportBench", "check_transport", "run_transport_check"]
