"""Schedules under faults: random ones, shrunk ones, and one of each kind from the field."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from pdkv.testing.faults import Fault, FaultKind, Plan, RequestPlan, random_plan, run
from pdkv.testing.faults.mutants import MUTANTS
from pdkv.testing.faults.soak import soak
from pdkv.testing.faults.strategies import plans

pytestmark = pytest.mark.cpu

MODES = pytest.mark.parametrize("mode", ["pull", "push"])


def test_a_thousand_random_schedules_give_no_wrong_token_no_leak_and_no_crash() -> None:
    totals = soak(0, schedules=1000)
    assert totals.is_good, totals.shown
    assert totals.requests["completed"] > 2000
    assert set(totals.faults) >= {str(kind) for kind in FaultKind} | {"agent_rebuilt", "sleep_refused"}
    assert set(totals.requests) == {"completed", "failed", "gone", "refused", "unanswered"}


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plans())
def test_no_schedule_that_hypothesis_finds_goes_wrong(plan: Plan) -> None:
    outcome = run(plan)
    assert outcome.is_good, outcome


def test_random_schedules_read_early_and_throw_some_of_it_away() -> None:
    counts = [run(random_plan(seed)).counts for seed in range(300)]
    assert sum(of.get("early_reads", 0) for of in counts) > 20
    assert sum(of.get("early_reads_dropped", 0) for of in counts) > 5


def test_a_process_that_goes_on_does_what_came_meanwhile_in_the_order_in_which_it_came() -> None:
    # The second chunk is due just when prefill goes on; the first one has waited since it was stopped.
    request = RequestPlan(num_tokens=17, chunks=2, prefill_s=8.0)
    outcome = run(Plan(requests=(request,), faults=(Fault(FaultKind.STOP_PREFILL, 1, 7.9),)))
    assert outcome.faults[FaultKind.STOP_PREFILL] == 1
    assert outcome.is_good, outcome


@pytest.mark.parametrize("mutant", ["NoQuarantineOnDecode", "PairingFromTheEnd"])
def test_hypothesis_shrinks_a_failing_schedule_to_a_few_steps(mutant: str) -> None:
    quick = settings(
        max_examples=300, deadline=None, derandomize=True, database=None, phases=(Phase.generate, Phase.shrink)
    )
    plan = find(plans(), lambda plan: not run(plan, MUTANTS[mutant]).is_good, settings=quick)
    assert len(plan.requests) + len(plan.faults) <= 3


def test_a_schedule_is_the_same_each_time() -> None:
    assert random_plan(7) == random_plan(7)
    assert random_plan(7) != random_plan(8)
    assert run(random_plan(7)) == run(random_plan(7))


def test_the_soak_prints_one_json_object_as_its_last_line() -> None:
    command = [sys.executable, "-m", "pdkv.testing.faults", "--schedules", "100", "--seed", "2", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["schedules"] == 100
    assert last["completed"] > 0
    assert sum(last["faults"].values()) > 0
    assert [last[key] for key in ("wrong_tokens", "stray_writes", "leaked_blocks", "stuck", "crashes")] == [0] * 5


def test_the_soak_refuses_to_run_for_no_time() -> None:
    command = [sys.executable, "-m", "pdkv.testing.faults", "--minutes", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "above 0" in result.stderr


# Reports from the field, re-told.


@MODES
def test_aborted_while_the_transfer_is_in_flight_and_the_pool_is_wanted_by_others(mode: str) -> None:
    plan = Plan(
        requests=(RequestPlan(num_tokens=96, gone_s=0.5), *(RequestPlan(num_tokens=96, start_s=0.2),) * 4),
        mode=mode,  # type: ignore[arg-type]
        decode_blocks=13,
        faults=(Fault(FaultKind.SLOW, 0, 5.0),),
    )
    outcome = run(plan)
    assert outcome.is_good, outcome
    assert outcome.ended == {"gone": 1, "completed": 4}
    assert outcome.counts["quarantined_blocks"] == (6 if mode == "pull" else 12)  # a WRITE holds prefill's blocks too


@MODES
def test_a_prompt_of_three_and_a_half_prefill_chunks_with_delayed_writes(mode: str) -> None:
    plan = Plan(
        requests=(
            RequestPlan(num_tokens=56, chunks=4, prefill_s=8.0, early=True),
            RequestPlan(num_tokens=56, chunks=4),
        ),
        mode=mode,  # type: ignore[arg-type]
        faults=(Fault(FaultKind.SLOW, 0, 9.0), Fault(FaultKind.SLOW, 1, 3.0)),
    )
    outcome = run(plan)
    assert outcome.is_good, outcome
    assert outcome.ended == {"completed": 2}


@MODES
def test_200_requests_at_a_capacity_of_4(mode: str) -> None:
    requests = tuple(RequestPlan(start_s=number * 0.3, num_tokens=33) for number in range(200))
    outcome = run(Plan(requests=requests, mode=mode, capacity=4, decode_blocks=13))  # type: ignore[arg-type]
    assert outcome.is_good, outcome
    assert outcome.ended["completed"] > 50
    assert outcome.ended["completed"] + outcome.ended["refused"] == 200


@MODES
@pytest.mark.parametrize("offset_s", [1e6, -1e6])
def test_two_clocks_a_million_seconds_apart(mode: str, offset_s: float) -> None:
    requests = tuple(RequestPlan(start_s=number, queue_s=40.0) for number in range(5))
    outcome = run(Plan(requests=requests, mode=mode, clock_offset_s=offset_s))  # type: ignore[arg-type]
    assert outcome.is_good, outcome
    assert outcome.ended == {"completed": 5}


@MODES
def test_telemetry_that_raises_on_every_call(mode: str) -> None:
    outcome = run(Plan(requests=(RequestPlan(),) * 3, mode=mode, observer_raises=True))  # type: ignore[arg-type]
    assert outcome.is_good, outcome
    assert outcome.ended == {"completed": 3}
    assert outcome.counts["observer_errors"] > 3


@MODES
@pytest.mark.parametrize("kind", [FaultKind.KILL_PREFILL, FaultKind.RESTART_PREFILL, FaultKind.STOP_PREFILL])
def test_prefill_dies_restarts_or_stops_during_a_transfer_and_decode_goes_on(mode: str, kind: FaultKind) -> None:
    plan = Plan(
        requests=(RequestPlan(num_tokens=96), RequestPlan(start_s=100.0)),
        mode=mode,  # type: ignore[arg-type]
        faults=(Fault(FaultKind.SLOW, 0, 10.0), Fault(kind, 5, 60.0)),
    )
    outcome = run(plan)
    assert outcome.is_good, outcome
    after = "unanswered" if kind is FaultKind.KILL_PREFILL else "completed"
    assert outcome.ended[after] >= 1
    assert outcome.ended["failed"] + outcome.ended["completed"] + outcome.ended["unanswered"] == 2


@MODES
def test_decode_dies_and_prefill_gets_all_its_blocks_back(mode: str) -> None:
    requests = tuple(RequestPlan(start_s=number * 0.2, queue_s=5.0) for number in range(10))
    outcome = run(Plan(requests=requests, mode=mode, faults=(Fault(FaultKind.KILL_DECODE, 21),)))  # type: ignore[arg-type]
    assert outcome.is_good, outcome
    assert outcome.counts["leases_expired"] >= 5


@MODES
def test_I10_prefill_sleeps_and_wakes_between_requests(mode: str) -> None:
    plan = Plan(
        requests=(RequestPlan(), RequestPlan(start_s=20.0), RequestPlan(start_s=22.0)),
        mode=mode,  # type: ignore[arg-type]
        faults=(Fault(FaultKind.SLEEP_PREFILL, 100, 5.0),),
    )
    outcome = run(plan)
    assert outcome.is_good, outcome
    assert outcome.ended == {"completed": 3}


@MODES
@pytest.mark.parametrize("kind", [FaultKind.REBUILD_DECODE, FaultKind.REBUILD_PREFILL])
def test_I11_an_agent_that_is_rebuilt_under_running_transfers(mode: str, kind: FaultKind) -> None:
    plan = Plan(
        requests=(RequestPlan(), RequestPlan(start_s=0.5), RequestPlan(start_s=60.0)),
        mode=mode,  # type: ignore[arg-type]
        block_s=2.0,
        faults=(Fault(kind, 30),),
    )
    outcome = run(plan)
    assert outcome.is_good, outcome
    completed = 3 if kind is FaultKind.REBUILD_DECODE else 1  # prefill's leases name a generation that is gone
    assert outcome.ended["completed"] == completed
    assert outcome.ended.total() == 3


def test_prefill_is_aborted_while_decode_has_registered_early() -> None:
    plan = Plan(
        requests=(RequestPlan(prefill_s=8.0, early=True), RequestPlan(start_s=10.0)),
        mode="push",
        faults=(Fault(FaultKind.ABORT_PREFILL, 40),),
    )
    outcome = run(plan)
    assert outcome.is_good, outcome
    assert outcome.ended == {"failed": 1, "completed": 1}
    assert outcome.counts["failed_prefill_aborted"] == 2  # once on each side


@MODES
def test_a_registered_region_whose_transfers_fail_costs_only_the_requests_in_it(mode: str) -> None:
    plan = Plan(
        requests=tuple(RequestPlan(start_s=number * 0.1, steps=5) for number in range(6)),
        mode=mode,  # type: ignore[arg-type]
        decode_blocks=40,
        faults=(Fault(FaultKind.BAD_REGION, 1),),
    )
    outcome = run(plan)
    assert outcome.is_good, outcome
    assert outcome.ended["completed"] > 0
    assert outcome.ended["failed"] > 0
