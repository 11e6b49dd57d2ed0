"""Runs one schedule from its first request until nothing is left to happen, and says what was wrong, if anything."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from pdkv.testing.faults.decoding import SimDecode
from pdkv.testing.faults.fabric import Fabric
from pdkv.testing.faults.plan import Fault, FaultKind, Plan
from pdkv.testing.faults.prefill import SimPrefill
from pdkv.testing.faults.wheel import Wheel, WheelClock
from pdkv.transfer import consumer_loading, producer
from pdkv.transfer.blocks import BlockPair, BlockRun, pair_by_index
from pdkv.transfer.consumer import Consumer
from pdkv.transfer.counters import Counters
from pdkv.transfer.producer import Producer
from pdkv.transfer.reference import Reference

HORIZON_S = 5000.0  # by then every deadline has passed several times


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes under test; a broken one in its place shows that the simulation would notice."""

    producer: type[Producer] = Producer
    consumer: type[Consumer] = Consumer
    pair: Callable[[Sequence[BlockRun], Sequence[BlockRun]], tuple[BlockPair, ...]] = pair_by_index


@dataclass(slots=True)
class Outcome:
    """What came of a schedule.

    Attributes:
        faults: faults that really happened, by kind.
        ended: requests by how they ended: completed, failed, gone, refused, unanswered (prefill died first).
        wrong_tokens: tokens that the right KV would not have given.
        stray_writes: blocks that a transfer wrote while they belonged to something else (I11).
        leaked_blocks: blocks that are in no pool at the end.
        stuck: requests that never ended, and endpoints that still wait for something.
        crash: what was raised, or "".
        counts: of both engines, by name.
    """

    faults: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    wrong_tokens: int = 0
    stray_writes: int = 0
    leaked_blocks: int = 0
    stuck: list[str] = field(default_factory=list)
    crash: str = ""
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Nothing that must not happen has happened."""
        return not (self.wrong_tokens or self.stray_writes or self.leaked_blocks or self.stuck or self.crash)


class Simulation:
    """One prefill and one decode engine, whoever routes between them, and a plan."""

    def __init__(self, plan: Plan, parts: Parts | None = None) -> None:
        self._plan = plan
        self._parts = parts or Parts()
        self._wheel = Wheel()
        self._fabric = Fabric(self._wheel, plan.faults, plan.block_s)
        self._counters = Counters(_raise if plan.observer_raises else None)
        self._unanswered: set[str] = set()
        self._at_decode: set[str] = set()
        self._engines = 0
        self.prefill = self._new_prefill()
        self.decode = SimDecode(
            self._wheel, self._fabric, WheelClock(self._wheel), plan, self._parts.consumer, self._counters
        )
        self._plan_faults()
        for number, request in enumerate(plan.requests):
            self._wheel.at(request.start_s, lambda n=number: self._begin(n))  # type: ignore[misc]

    def run(self) -> Outcome:
        """Let everything happen."""
        outcome = Outcome()
        try:
            self._wheel.run(HORIZON_S)
        except Exception:
            outcome.crash = traceback.format_exc()
        outcome.faults, outcome.counts = self._fabric.injected, self._counters.as_dict()
        outcome.wrong_tokens, outcome.stray_writes = self.decode.wrong_tokens, self._fabric.stray_writes
        outcome.ended = Counter(self.decode.ended)
        if self._unanswered:
            outcome.ended["unanswered"] = len(self._unanswered)
        if not outcome.crash:
            self._take_stock(outcome)
        return outcome

    def _take_stock(self, outcome: Outcome) -> None:
        for node in (self.prefill, self.decode):
            if not node.alive:
                continue
            outcome.leaked_blocks += node.memory.num_leaked
            endpoint = node.endpoint
            if endpoint.holders() or endpoint.next_deadline() is not None or endpoint.quarantine.num_blocks:
                outcome.stuck.append(node.me.engine_id)
        if self.decode.alive:
            outcome.stuck += self.decode.unfinished()

    def _new_prefill(self) -> SimPrefill:
        self._engines += 1
        clock = WheelClock(self._wheel, self._plan.clock_offset_s)
        return SimPrefill(
            self._wheel,
            self._fabric,
            clock,
            f"P/{self._engines}",
            self._plan.prefill_blocks,
            self._parts.producer,
            self._counters,
            self._prefilled,
        )

    # Whoever routes requests.

    def _begin(self, number: int) -> None:
        request, request_id = self._plan.requests[number], f"request-{number}"
        self._unanswered.add(request_id)
        if request.gone_s is not None:
            self.decode.after(request.gone_s, lambda: self.decode.client_gone(request_id))
        if not self.prefill.alive:
            return
        if request.early and self._plan.mode == "push":
            self.prefill.when_running(lambda: self._send_early(request_id, request.num_tokens))
        self.prefill.when_running(lambda: self.prefill.start(request_id, request))

    def _send_early(self, request_id: str, num_tokens: int) -> None:
        if not self.prefill.endpoint.asleep:
            self._to_decode(request_id, self.prefill.endpoint.expect(request_id, num_tokens))

    def _prefilled(self, request_id: str, reference: Reference) -> None:
        self._wheel.after(0.002, lambda: self._to_decode(request_id, reference))

    def _to_decode(self, request_id: str, reference: Reference) -> None:
        if request_id in self._at_decode:
            return
        self._at_decode.add(request_id)
        self._unanswered.discard(request_id)
        request = self._plan.requests[int(request_id.split("-")[1])]
        reference = Reference.from_params(_routed(reference.to_params(), request.altered))
        self.decode.when_running(lambda: self.decode.arrive(request_id, request, reference))
        if request.replay_s is not None:
            again = f"replayed-{request_id}"
            self.decode.after(request.replay_s, lambda: self.decode.arrive(again, request, reference))

    # Faults of processes.

    def _plan_faults(self) -> None:
        for fault in self._plan.faults:
            if fault.kind is FaultKind.BAD_REGION:
                self.decode.memory.bad_chunks.add(fault.at)
                self._fabric.injected[fault.kind] += 1
            elif fault.kind in _PROCESS_FAULTS:
                self._wheel.at(fault.at / 10, lambda f=fault: self._inject(f))  # type: ignore[misc]

    def _inject(self, fault: Fault) -> None:
        self._fabric.injected[fault.kind] += 1
        match fault.kind:
            case FaultKind.KILL_PREFILL:
                self.prefill.alive = False
            case FaultKind.RESTART_PREFILL:
                self.prefill.alive = False
                self._wheel.after(fault.amount, self._restart)
            case FaultKind.STOP_PREFILL:
                self.prefill.stop(fault.amount)
            case FaultKind.STOP_DECODE:
                self.decode.stop(fault.amount)
            case FaultKind.KILL_DECODE:
                self.decode.alive = False
            case FaultKind.ABORT_PREFILL:
                prefill = self.prefill
                prefill.when_running(prefill.abort_all)
            case FaultKind.REBUILD_PREFILL:
                self.prefill.when_running(self.prefill.rebuild)
            case FaultKind.REBUILD_DECODE:
                self.decode.when_running(self.decode.rebuild)
            case FaultKind.SLEEP_PREFILL:
                prefill = self.prefill
                prefill.when_running(lambda: prefill.sleep(fault.amount))

    def _restart(self) -> None:
        if not self.prefill.alive:
            self.prefill = self._new_prefill()


_PROCESS_FAULTS = (
    FaultKind.KILL_PREFILL,
    FaultKind.RESTART_PREFILL,
    FaultKind.STOP_PREFILL,
    FaultKind.STOP_DECODE,
    FaultKind.KILL_DECODE,
    FaultKind.ABORT_PREFILL,
    FaultKind.SLEEP_PREFILL,
    FaultKind.REBUILD_PREFILL,
    FaultKind.REBUILD_DECODE,
)


def _routed(params: dict[str, Any], altered: bool) -> dict[str, Any]:
    """The reference after its way through others: as it was, or with other blocks."""
    if altered:
        params["blocks"] = [[first, [block_id + 1 for block_id in ids]] for first, ids in params["blocks"]]
    return params


def _raise(name: str, amount: int) -> None:
    raise RuntimeError(f"telemetry is broken: {name} {amount}")


def run(plan: Plan, parts: Parts | None = None) -> Outcome:
    """Run one schedule."""
    parts = parts or Parts()
    with (
        mock.patch.object(consumer_loading, "pair_by_index", parts.pair),
        mock.patch.object(producer, "pair_by_index", parts.pair),
    ):
        return Simulation(plan, parts).run()
