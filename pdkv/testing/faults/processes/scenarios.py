"""What happens to P and D, one fault at a time. After each, whoever is left has all blocks back and serves the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pdkv.errors import HarnessError
from pdkv.testing.child import ChildEnded
from pdkv.testing.faults.processes.deployment import Deployment
from pdkv.testing.faults.processes.proxy import Weather
from pdkv.testing.faults.processes.sleep_scenarios import PUSH_ONLY, SLEEP_SCENARIOS

#: How often a scenario is begun in which UCX ends an engine.
ATTEMPTS = 3
SCENARIOS: dict[str, Callable[[Deployment], None]] = {}
"""All by name. Each leaves a deployment with which the next one can begin."""


def scenarios_of(mode: Literal["pull", "push"]) -> list[str]:
    """The names of those that can be run in this direction, in order."""
    return [name for name in SCENARIOS if mode == "push" or name not in PUSH_ONLY]


def run_scenario(name: str, deployment: Deployment) -> None:
    """Run one scenario, and see that what is left serves.

    UCX itself ends a process that was answering a peer over an emulated transport (tcp) when that peer died. Nothing in
    the process can prevent it, and it says nothing of what the scenario asks, so the scenario is run again; it is
    counted, and docs/failures.md tells users.

    Raises:
        HarnessError: something did not happen that must, or an engine died that was not killed.
    """
    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            _run_once(name, deployment)
        except (HarnessError, ChildEnded):
            if not deployment.starts_anew_after_ucx() or not attempts_left:
                raise
        else:
            break
    deployment.totals.schedules += 1


def _run_once(name: str, deployment: Deployment) -> None:
    SCENARIOS[name](deployment)
    deployment.proxy.calm_down()
    deployment.no_block_is_held()
    deployment.serves()


def _scenario(function: Callable[[Deployment], None]) -> Callable[[Deployment], None]:
    SCENARIOS[function.__name__] = function
    return function


@_scenario
def all_is_well(deployment: Deployment) -> None:
    for num_tokens in (1, 16, 17, 100, 200):
        deployment.ask(num_tokens)
    deployment.finish("completed")


@_scenario
def the_side_channel_loses_delays_and_repeats(deployment: Deployment) -> None:
    deployment.proxy.weather = Weather(drop=0.15, delay=0.3, duplicate=0.2)
    for _ in range(8):
        for _ in range(3):
            deployment.ask(40)
        deployment.finish("completed", "failed")


@_scenario
def the_side_channel_is_cut_again_and_again(deployment: Deployment) -> None:
    for _ in range(4):
        deployment.ask(60)
        deployment.proxy.cut()
        deployment.ask(20)
        deployment.finish("completed", "failed")


@_scenario
def no_message_passes_for_longer_than_a_lease(deployment: Deployment) -> None:
    deployment.ask(held=True)
    deployment.proxy.partition(True)
    deployment.finish("failed")


@_scenario
def prefill_is_killed_before_decode_has_asked(deployment: Deployment) -> None:
    asked, reference = deployment.prefill()
    deployment.kill("P")
    deployment.arrive(asked, reference)
    deployment.finish("failed")


@_scenario
def prefill_is_killed_while_a_request_waits_for_blocks(deployment: Deployment) -> None:
    deployment.ask(held=True)
    deployment.kill("P")
    deployment.finish("failed")


@_scenario
def prefill_is_killed_under_a_transfer(deployment: Deployment) -> None:
    deployment.in_flight()
    deployment.kill("P")
    if deployment.mode == "push":
        deployment.resume("D")
    deployment.finish("failed", "completed")


@_scenario
def a_peer_is_stopped_under_a_transfer_and_never_goes_on(deployment: Deployment) -> None:
    """Nothing ends such a transfer but the end of its agent; until then its blocks are in quarantine.

    A transport that needs nothing of the owner may bring it to its end.
    """
    deployment.in_flight()
    if deployment.mode == "pull":
        deployment.finish("failed", "completed")
        deployment.no_block_is_held()
        deployment.kill("P")
    else:
        deployment.no_block_is_held()
        deployment.kill("D")


@_scenario
def decode_is_killed_while_a_request_waits_for_blocks(deployment: Deployment) -> None:
    deployment.ask(held=True)
    deployment.kill("D")


@_scenario
def decode_is_killed_under_a_transfer(deployment: Deployment) -> None:
    asked = deployment.ask(500, held=True)
    deployment.until(lambda: deployment.d.ask("knows_lease", request_id=asked.request_id), "D knows P's lease")
    deployment.d.ask("allocate", request_id=asked.request_id)
    deployment.kill("D")


@_scenario
def a_stopped_peer_goes_on_in_time(deployment: Deployment) -> None:
    deployment.in_flight()
    deployment.resume("P" if deployment.mode == "pull" else "D")
    deployment.finish("completed")


@_scenario
def decode_is_stopped_until_its_lease_is_over(deployment: Deployment) -> None:
    """P has given the blocks to others when D goes on; what D may still bring must not count."""
    asked = deployment.ask(held=True)
    deployment.until(lambda: deployment.d.ask("knows_lease", request_id=asked.request_id), "D knows P's lease")
    deployment.stop("D")
    deployment.no_block_is_held()
    deployment.prefill(200)
    deployment.resume("D")
    deployment.d.ask("allocate", request_id=asked.request_id)
    deployment.finish("failed")


SCENARIOS.update(SLEEP_SCENARIOS)
