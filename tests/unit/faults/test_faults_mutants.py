"""The simulation notices each broken rule: a schedule of a few steps goes wrong with it, and right without."""

from __future__ import annotations

import pytest

from pdkv.testing.faults import Fault, FaultKind, Plan, RequestPlan, run
from pdkv.testing.faults.mutants import MUTANTS

pytestmark = pytest.mark.cpu

ONE = RequestPlan()

SEALS = ("ReferencesNotSealed", "ReferencesUsedTwice")

# Found by random schedules and shrunk; the last two were made by hand, around windows of 0.3 s.
EXPOSING = {
    "NoQuarantineOnDecode": Plan(requests=(RequestPlan(preempt="loading"),)),
    "NoQuarantineOnPrefill": Plan(requests=(ONE,), mode="push", faults=(Fault(FaultKind.NEVER_COMPLETES, 0, 17.0),)),
    "ReaperLooksAtTheHead": Plan(
        requests=(RequestPlan(prefill_s=8.0, queue_s=29.9), RequestPlan(start_s=3.6)),
        faults=(Fault(FaultKind.KILL_DECODE, 197), Fault(FaultKind.SLOW, 0, 42.8)),
    ),
    "IdleEngineDoesNotReap": Plan(requests=(RequestPlan(prefill_s=8.0),), faults=(Fault(FaultKind.KILL_DECODE, 77),)),
    "CompletionTwice": Plan(requests=(ONE,), faults=(Fault(FaultKind.DUPLICATE, 4, 0.1),)),
    "LeaseAssumedAlive": Plan(requests=(RequestPlan(queue_s=44.7),), faults=(Fault(FaultKind.PARTITION, 53, 49.3),)),
    "EarlyReadsBelieved": Plan(
        requests=(ONE, RequestPlan(start_s=5.0, altered=True)),
        fenced=True,
        faults=(Fault(FaultKind.PARTITION, 50, 1.0),),
    ),
    "DoneWhenPosted": Plan(requests=(ONE, ONE), mode="push", faults=(Fault(FaultKind.SLOW, 1, 29.8),)),
    "RegistrationsReplayed": Plan(
        requests=(
            RequestPlan(prefill_s=1.0, preempt="loading"),
            RequestPlan(prefill_s=1.0),
            RequestPlan(prefill_s=1.0),
        ),
        mode="push",
        faults=(Fault(FaultKind.DUPLICATE, 8, 0.1),),
    ),
    "CancelAcknowledgedAtOnce": Plan(requests=(RequestPlan(preempt="loading"),), mode="push"),
    "WatchdogOnlyLogs": Plan(requests=(ONE,), faults=(Fault(FaultKind.NEVER_COMPLETES, 0, 25.4),)),
    "AbortForgetsHeldLeases": Plan(
        requests=(RequestPlan(start_s=22.6, prefill_s=1.0, preempt="decoding"),),
        hold_s=3.0,
        faults=(Fault(FaultKind.ABORT_PREFILL, 240),),
    ),
    "ReferencesNotSealed": Plan(requests=(RequestPlan(altered=True),)),
    "ReferencesUsedTwice": Plan(
        requests=(RequestPlan(queue_s=3.0, replay_s=1.0), RequestPlan(start_s=5.0)), prefill_blocks=10
    ),
    "PairingFromTheEnd": Plan(requests=(RequestPlan(extra_block=True),)),
    "CompletionOfAnyAttempt": Plan(
        requests=(RequestPlan(preempt="decoding"),),
        mode="push",
        hold_s=30.0,
        faults=(Fault(FaultKind.DUPLICATE, 6, 1.5), Fault(FaultKind.SLOW, 1, 2.0)),
    ),
    "RebuildAssumedDone": Plan(
        requests=(RequestPlan(preempt="loading"),), faults=(Fault(FaultKind.NEVER_COMPLETES, 0, 30.15),)
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    assert not run(EXPOSING[name], MUTANTS[name]).is_good


@pytest.mark.parametrize("name", EXPOSING)
def test_the_same_schedule_is_right_with_the_rule_as_it_is(name: str) -> None:
    outcome = run(EXPOSING[name])
    assert outcome.is_good, outcome


def test_each_broken_rule_has_its_schedule() -> None:
    assert set(EXPOSING) == set(MUTANTS)


def test_I11_without_quarantine_other_requests_are_written_over() -> None:
    assert run(EXPOSING["NoQuarantineOnDecode"], MUTANTS["NoQuarantineOnDecode"]).stray_writes > 0


@pytest.mark.parametrize(
    "name",
    [
        "PairingFromTheEnd",
        "DoneWhenPosted",
        "LeaseAssumedAlive",
        "EarlyReadsBelieved",
        "CompletionOfAnyAttempt",
        *SEALS,
    ],
)
def test_a_wrong_byte_is_a_wrong_token(name: str) -> None:
    assert run(EXPOSING[name], MUTANTS[name]).wrong_tokens > 0


def test_a_lease_that_nobody_reaps_is_a_leak() -> None:
    assert run(EXPOSING["IdleEngineDoesNotReap"], MUTANTS["IdleEngineDoesNotReap"]).leaked_blocks == 3


def test_a_double_free_is_a_crash() -> None:
    assert "does not own it" in run(EXPOSING["CompletionTwice"], MUTANTS["CompletionTwice"]).crash
