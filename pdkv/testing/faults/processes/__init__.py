"""Real processes under real faults: engines that are killed and stopped, a side channel that loses, over a transport.

``python -m pdkv.testing.faults --processes`` runs every scenario of :mod:`pdkv.testing.faults.processes.scenarios`.
"""

from __future__ import annotations

from pdkv.testing.faults.processes.deployment import Deployment, Totals
from pdkv.testing.faults.processes.run import OVER_TCP, run_processes
from pdkv.testing.faults.processes.scenarios import SCENARIOS, run_scenario, scenarios_of
from pdkv.testing.faults.processes.sleep_scenarios import SLEEP_SCENARIOS

__all__ = [
    "OVER_TCP",
    "SCENARIOS",
    "SLEEP_SCENARIOS",
    "Deployment",
    "Totals",
    "run_processes",
    "run_scenario",
    "scenarios_of",
]
