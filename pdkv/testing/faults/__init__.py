"""A deterministic simulation of prefill and decode under faults. No GPU, no network, no sleep.

The real :class:`pdkv.transfer.Producer` and :class:`pdkv.transfer.Consumer`, with their leases, quarantine and
admission, run between a simulated pool on each side, a side channel that loses, delays, repeats and reorders, and a
transport with a NIC's rules. The next token of the toy model is a hash of all KV bytes, so that any wrong byte shows.

- :func:`run` runs one :class:`Plan`; :func:`random_plan` makes one out of a number.
- ``python -m pdkv.testing.faults --minutes 10 --seed 1`` soaks.
- `pdkv.testing.faults.strategies` has hypothesis find and shrink a failing plan.
- `pdkv.testing.faults.mutants` are broken variants of the rules, to see that each is noticed.
"""

from __future__ import annotations

from pdkv.testing.faults.plan import Fault, FaultKind, Plan, RequestPlan, random_plan
from pdkv.testing.faults.simulation import Outcome, Parts, run

__all__ = ["Fault", "FaultKind", "Outcome", "Parts", "Plan", "RequestPlan", "random_plan", "run"]
