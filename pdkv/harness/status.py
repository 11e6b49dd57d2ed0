"""What the engines said of themselves during a run, and what must hold of it.

The engines write status files; :func:`pdkv.launch.deployment.read_status` reads them. Counters run from an engine's
start, so a run is the difference of two readings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdkv.errors import HarnessError

#: What is reported of each engine; the names are those of the status files.
ENGINE_KEYS = (
    "capacity_blocks",
    "warmup_blocks",
    "final_blocks",
    "bytes_reserved",
    "bytes_committed",
    "segments",
    "chunks_per_segment",
    "generation",
    "connector_created_after_extend",
)
COUNTERS = ("requests", "remote_prefill_hits", "remote_tokens", "recomputed_tokens", "failed_loads")

Status = Mapping[str, Any]
#: Reads the status of "prefill" or "decode" now.
ReadStatus = Callable[[str], Status]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """A run as the engines saw it: the keys of :data:`ENGINE_KEYS` by role, and decode's counters."""

    engines: Mapping[str, Mapping[str, Any]]
    decode_counts: Mapping[str, int] = field(default_factory=dict)


def counters(status: Status) -> dict[str, int]:
    """The scheduler's counters; zeros before its first request."""
    scheduler = status.get("scheduler") or {}
    return {name: int(scheduler.get(name, 0)) for name in COUNTERS}


def collect(
    read: ReadStatus, before: Mapping[str, int], requests: int, *, timeout_s: float = 30.0, poll_s: float = 0.2
) -> EngineFacts:
    """The facts of a run of `requests` requests, once decode has counted them all or `timeout_s` has passed.

    A client has its answer a moment before the scheduler writes its counters. What decode has not counted in time is
    not waited for any longer: the report then shows too few hits.

    Args:
        before: decode's counters when the run began.

    Raises:
        HarnessError: an engine has written no status.
    """
    deadline = time.monotonic() + timeout_s
    while counters(read("decode"))["requests"] - before["requests"] < requests and time.monotonic() < deadline:
        time.sleep(poll_s)
    after = counters(read("decode"))
    engines = {role: engine_facts(role, read(role)) for role in ("prefill", "decode")}
    return EngineFacts(engines, {name: after[name] - before[name] for name in COUNTERS})


def engine_facts(role: str, status: Status) -> dict[str, Any]:
    """One engine in the report: rank 0's values, and over all ranks the worst of what a report is judged by."""
    workers = list(status.get("workers") or ())
    if not workers:
        raise HarnessError(
            f"the {role} engine has written no status file, so nothing is known of its cache; is PDKV_STATUS_DIR set "
            "for it, and is it a pdkv engine?"
        )
    missing = [key for key in ENGINE_KEYS if key not in workers[0]]
    if missing:
        raise HarnessError(
            f"the status of the {role} engine lacks {', '.join(missing)}; is it of this version of pdkv?"
        )
    facts = {key: workers[0][key] for key in ENGINE_KEYS}
    facts["chunks_per_segment"] = max(int(worker["chunks_per_segment"]) for worker in workers)
    facts["connector_created_after_extend"] = all(bool(w["connector_created_after_extend"]) for w in workers)
    facts["ranks"] = len(workers)
    return facts
