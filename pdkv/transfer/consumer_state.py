"""What D keeps of each request, and the settings of its side."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from pdkv.transfer.blocks import BlockRun
from pdkv.transfer.endpoint import EndpointSettings
from pdkv.transfer.messages import Claim, FailCode, TransferKey
from pdkv.transfer.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings(EndpointSettings):
    """Times in seconds.

    Attributes:
        mode: "pull" (D reads) or "push" (P writes).
        on_failure: what a failed load does to its request; vLLM's ``kv_load_failure_policy``.
        wait_s: the most from arrival until the engine allocates blocks.
        transfer_s: the watchdog: the most from then until the KV is there.
        silence_s: how long P may leave renewals unanswered before it counts as lost; three renewals.
        handshake_every_s: how often a handshake is tried until it is answered.
        hold_s: how long the lease is kept after arrival, so that a preempted request can read again.
        max_attempts: transfers of one request at most; further ones follow a preemption or a rebuilt agent.
        max_used: references that are remembered as used.
    """

    mode: Literal["pull", "push"] = "pull"
    on_failure: Literal["fail", "recompute"] = "fail"
    wait_s: float = 600.0
    transfer_s: float = 120.0
    silence_s: float = 15.0
    handshake_every_s: float = 1.0
    hold_s: float = 0.0
    max_attempts: int = 3
    max_used: int = 65_536


class Phase(Enum):
    """Where a request on D is; see :mod:`pdkv.transfer.consumer`."""

    WAITING = auto()
    STARTING = auto()
    RUNNING = auto()
    CONFIRMING = auto()
    LOADED = auto()


@dataclass(slots=True)
class Request:
    """A request on D whose prompt was computed elsewhere. Times are readings of D's clock, in seconds.

    Attributes:
        request_id: D's own; `key.request_id` is P's.
        key: the present attempt.
        claim: what P is shown of the reference in every message.
        runs: destination blocks, one run per KV-cache group, from `allocated` until they are let go.
        deadline: when the present phase has lasted too long.
        heard_at: when the last question was asked that P has answered.
        live_sequence: of the newest renewal that P answered with "live"; -1 before.
        is_early: the READ was posted before P had said that the lease lives.
        read_ended_at: when the READ was seen to have ended.
        read_failure: of an early READ that failed, for when P has said whether it held the blocks.
    """

    request_id: str
    reference: Reference
    key: TransferKey
    claim: Claim
    deadline: float
    heard_at: float
    phase: Phase = Phase.WAITING
    runs: tuple[BlockRun, ...] = ()
    attempts: int = 1
    live_sequence: int = -1
    is_early: bool = False
    read_ended_at: float = 0.0
    read_failure: tuple[FailCode, str] | None = None
