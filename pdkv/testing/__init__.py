"""Conformance suites for what others can plug into pdkv, and what they are made of. Needs no test framework.

`check_driver` and its parts, `DRIVER_CHECKS`, are for memory drivers.
"""

from __future__ import annotations

from pdkv.testing.drivers import DRIVER_CHECKS, check_driver, run_driver_check
from pdkv.testing.rules import BrokenRuleError

__all__ = ["DRIVER_CHECKS", "BrokenRuleError", "check_driver", "run_driver_check"]
