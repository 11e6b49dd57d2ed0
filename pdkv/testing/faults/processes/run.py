"""Runs scenarios one after the other, both directions, for as long as is wanted, and says what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pdkv.errors import HarnessError
from pdkv.registry import find_transport
from pdkv.testing.child import ChildEnded, ChildError
from pdkv.testing.faults.processes.deployment import Deployment, Totals
from pdkv.testing.faults.processes.scenarios import run_scenario, scenarios_of

#: Over tcp UCX waits for a stopped peer, so that a transfer can be caught in flight.
OVER_TCP = {"UCX_TLS": "tcp"}
Mode = Literal["pull", "push"]


def run_processes(transport: str, *, seed: int = 0, seconds: float = 0.0, say: Callable[[str], None] = print) -> Totals:
    """Every scenario in each direction that the transport has, once at least, and again until `seconds` have passed.

    Args:
        transport: by its name in the entry-point group ``pdkv.transports``.
        say: told a line for each scenario.

    Raises:
        ConfigError, TransportError: there is no such transport here.
    """
    modes = _modes_of(transport)
    totals, begin = Totals(), time.monotonic()
    while True:
        for mode in modes:
            _run_mode(transport, mode, seed, totals, say)
        seed += 1
        if time.monotonic() - begin >= seconds:
            return totals


def _modes_of(transport: str) -> Sequence[Mode]:
    """Pull where it can read, push where it can write."""
    made = find_transport(transport)()
    made.close()
    modes: dict[Mode, bool] = {"pull": made.can_read, "push": made.can_write}
    return [mode for mode, possible in modes.items() if possible]


def _run_mode(transport: str, mode: Mode, seed: int, totals: Totals, say: Callable[[str], None]) -> None:
    """A scenario that goes wrong leaves engines of which nothing is known: the next one gets others."""
    names = scenarios_of(mode)
    while names:
        with (
            TemporaryDirectory(prefix="pdkv-processes-") as folder,
            Deployment(Path(folder), transport=transport, mode=mode, variables=OVER_TCP, seed=seed) as deployment,
        ):
            good = True
            while names and good:
                good = _run_one(names.pop(0), deployment, say)
        totals.add(deployment.totals)
        if not deployment.totals.completed:
            say(f"{mode}: no request was completed at all, so the other scenarios are left out")
            return


def _run_one(name: str, deployment: Deployment, say: Callable[[str], None]) -> bool:
    begin = time.monotonic()
    try:
        run_scenario(name, deployment)
    except (HarnessError, ChildEnded, ChildError, TimeoutError) as error:
        deployment.totals.broken += 1
        say(f"{deployment.mode} {name}: {error}")
        return False
    say(f"{deployment.mode} {name}: well, in {time.monotonic() - begin:.1f} s")
    return True
