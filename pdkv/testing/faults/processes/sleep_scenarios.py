"""What happens to the peer at each arrow of :mod:`pdkv.lifecycle.states`, and to transfers that a sleep comes upon.

The engine that sleeps, wakes or lends sends the signal itself, within the transition. After each scenario whoever is
left has all blocks and all memory, and serves.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdkv.errors import HarnessError
from pdkv.lifecycle import SleepMode, State
from pdkv.testing.child import Child
from pdkv.testing.faults.processes.deployment import Asked, Deployment

SLEEP_SCENARIOS: dict[str, Callable[[Deployment], None]] = {}
"""All by name, in the order in which they are run."""
PUSH_ONLY: set[str] = set()
"""Those of them that are about what only a push does."""

_SIDES = {"prefill": "P", "decode": "D"}
_SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}


@dataclass(frozen=True, slots=True)
class _Struck:
    """What befalls the peer, at a step of :class:`pdkv.testing.faults.processes.asleep.EngineConnector`."""

    step: str
    signal: signal.Signals


def _sleep(deployment: Deployment, side: str, mode: SleepMode = "abort", struck: _Struck | None = None) -> None:
    """Give the engine's memory back; it has to be free again, as the driver counts it, but for what a peer keeps."""
    report = _with_strike(deployment, side, struck, "sleep", mode=mode, deadline_s=30.0)
    _require_given_back(side, report, struck)
    _require_state(deployment, side, State.ASLEEP)


def _refused(deployment: Deployment, side: str, struck: _Struck) -> None:
    """A sleep is refused, for a request holds blocks, and the engine runs on."""
    report = _with_strike(deployment, side, struck, "sleep", mode="refuse", deadline_s=0.0)
    if "refused" not in report:
        raise HarnessError(f"{side} went to sleep although a request holds blocks.")
    _require_state(deployment, side, State.RUNNING)


def _wake(deployment: Deployment, side: str, struck: _Struck | None = None) -> None:
    _with_strike(deployment, side, struck, "wake")
    _require_state(deployment, side, State.RUNNING)


def _lend(deployment: Deployment, side: str, struck: _Struck) -> None:
    """A weight update gets the engine's memory; afterwards it has as much again."""
    report = _with_strike(deployment, side, struck, "lend")
    _require_given_back(side, report, struck)
    if report["after"] != report["before"]:
        raise HarnessError(f"{side} had {report['before']} bytes before a weight update, {report['after']} after it.")
    _require_state(deployment, side, State.RUNNING)


def _with_strike(deployment: Deployment, side: str, struck: _Struck | None, do: str, **arguments: Any) -> Any:
    engine = _engine(deployment, side)
    if struck is None:
        return engine.ask(do, **arguments)
    peer = _other(side)
    pid = _engine(deployment, peer).process.pid
    said = engine.ask(do, strike=[struck.step, pid, int(struck.signal)], **arguments)
    if struck.signal is signal.SIGKILL:
        deployment.was_killed(peer)
    else:
        deployment.was_stopped(peer)
    return said


def _require_given_back(side: str, report: dict[str, Any], struck: _Struck | None) -> None:
    """What a stopped peer has mapped stays taken until it goes on, and is counted (ipc)."""
    kept = report["kept_by_peers"] > 0 and struck is not None and struck.signal is signal.SIGSTOP
    if "refused" in report or report["held"] or (report["given_back"] < report["before"] and not kept):
        raise HarnessError(f"{side} has not given its memory back: {report}.")


def _require_state(deployment: Deployment, side: str, state: State) -> None:
    if (found := _engine(deployment, side).ask("lifecycle")) != state:
        raise HarnessError(f"the cache of {side} is {found}, expected {state}.")


def _engine(deployment: Deployment, side: str) -> Child:
    return deployment.p if side == "P" else deployment.d


def _other(side: str) -> str:
    return "D" if side == "P" else "P"


def _held(deployment: Deployment) -> Asked:
    """A request that waits on D for blocks of its own; P keeps its KV under a lease."""
    asked = deployment.ask(held=True)
    deployment.until(lambda: deployment.d.ask("knows_lease", request_id=asked.request_id), "D knows P's lease")
    return asked


# At each arrow of the table.


def _running_to_draining(deployment: Deployment, side: str, struck: _Struck) -> None:
    """P waits until the lease has ended, for D says nothing any more; D ends its request without P's word."""
    _held(deployment)
    _sleep(deployment, side, "wait" if side == "P" else "abort", struck)
    _goes_on(deployment, side)
    deployment.finish("failed")
    _wake(deployment, side)


def _draining_to_running(deployment: Deployment, side: str, struck: _Struck) -> None:
    """A refused sleep changes nothing: the request gets its KV, if the peer is still there."""
    asked = _held(deployment)
    _refused(deployment, side, struck)
    peer_lives = deployment.is_stopped(_other(side))
    _goes_on(deployment, side)
    if side == "D" or peer_lives:
        deployment.d.ask("allocate", request_id=asked.request_id)
    deployment.finish("completed" if peer_lives else "failed")


def _draining_to_asleep(deployment: Deployment, side: str, struck: _Struck) -> None:
    deployment.serves()
    _sleep(deployment, side, struck=struck)
    _wake(deployment, side)
    _goes_on(deployment, side)


def _asleep_to_running(deployment: Deployment, side: str, struck: _Struck) -> None:
    deployment.serves()
    _sleep(deployment, side)
    _wake(deployment, side, struck)
    _goes_on(deployment, side)


def _lent(deployment: Deployment, side: str, struck: _Struck) -> None:
    deployment.serves()
    _lend(deployment, side, struck)
    _goes_on(deployment, side)


def _goes_on(deployment: Deployment, side: str) -> None:
    """The peer, where it was stopped."""
    if deployment.is_stopped(_other(side)):
        deployment.resume(_other(side))


#: The step of the lifecycle at which an arrow begins, and what is done around it.
ARROWS: dict[str, tuple[str, Callable[[Deployment, str, _Struck], None]]] = {
    "running_to_draining": ("refuse_transfers", _running_to_draining),
    "draining_to_running": ("resume_transfers", _draining_to_running),
    "draining_to_asleep": ("unregister", _draining_to_asleep),
    "asleep_to_running": ("register", _asleep_to_running),
    "running_to_lent": ("unregister", _lent),
    "lent_to_running": ("register", _lent),
}


def _struck_at(arrow: str, sleeper: str, what: str, deployment: Deployment) -> None:
    step, scenario = ARROWS[arrow]
    scenario(deployment, _SIDES[sleeper], _Struck(step, _SIGNALS[what]))


for _arrow in ARROWS:
    for _what in _SIGNALS:
        for _sleeper, _peer in (("prefill", "decode"), ("decode", "prefill")):
            SLEEP_SCENARIOS[f"{_peer}_is_{_what}_as_{_sleeper}_goes_from_{_arrow}"] = partial(
                _struck_at, _arrow, _sleeper, _what
            )


# Transfers that a sleep comes upon.


def _scenario(function: Callable[[Deployment], None]) -> Callable[[Deployment], None]:
    SLEEP_SCENARIOS[function.__name__] = function
    return function


@_scenario
def decode_asks_for_what_prefill_had_before_it_slept(deployment: Deployment) -> None:
    """While prefill sleeps, and when it is awake again: refused both times, nothing is posted."""
    for awake in (False, True):
        asked, reference = deployment.prefill()
        _sleep(deployment, "P")
        if awake:
            _wake(deployment, "P")
        deployment.arrive(asked, reference)
        deployment.finish("failed")
        if not awake:
            _wake(deployment, "P")


@_scenario
def decode_sleeps_and_asks_prefill_to_forget_what_it_waits_for(deployment: Deployment) -> None:
    """In push a registration is cancelled by it, and prefill's word that it writes nothing is waited for."""
    asked = _held(deployment)
    deployment.d.ask("allocate", request_id=asked.request_id)
    _sleep(deployment, "D")
    deployment.finish("failed", "completed")
    deployment.no_block_is_held()
    _wake(deployment, "D")


@_scenario
def decode_sleeps_while_a_transfer_is_delayed(deployment: Deployment) -> None:
    """The transfer begins, or goes on, only when decode is asleep and has no agent any more.

    In push what makes prefill write is on its way until then. In pull prefill is stopped under the READ; a READ that is
    given up so may end its owner as it goes on (UCX over tcp), so that it does not.
    """
    expected = {"failed"}
    if deployment.mode == "pull":
        if not deployment.in_flight():
            expected = {"failed", "completed"}  # it decodes already
        _sleep(deployment, "D")
        deployment.kill("P")
    else:
        asked = _held(deployment)
        deployment.proxy.hold(True)
        deployment.d.ask("allocate", request_id=asked.request_id)
        deployment.until(lambda: deployment.proxy.holds(b"REGISTER"), "D asks for its blocks to be written")
        _sleep(deployment, "D")
        deployment.proxy.hold(False)
        deployment.no_block_is_held()
    deployment.finish(*expected)
    _wake(deployment, "D")


@_scenario
def decode_sleeps_under_a_write_of_a_prefill_that_is_stopped(deployment: Deployment) -> None:
    """The WRITE is posted, and prefill says nothing of it before decode has no agent any more."""
    deployment.in_flight()
    deployment.stop("P")
    deployment.resume("D")
    _sleep(deployment, "D")
    deployment.finish("failed", "completed")
    deployment.resume("P")
    deployment.no_block_is_held()
    _wake(deployment, "D")


PUSH_ONLY.add(decode_sleeps_under_a_write_of_a_prefill_that_is_stopped.__name__)
