"""A simulated decode engine: queue, pool, prefix cache, preemption, the toy model, and the real :class:`Consumer`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from pdkv.testing.faults.fabric import Fabric
from pdkv.testing.faults.memory import SimMemory, next_token, true_kv
from pdkv.testing.faults.node import SimNode
from pdkv.testing.faults.plan import Plan, RequestPlan
from pdkv.testing.faults.wheel import Wheel, WheelClock
from pdkv.transfer.actions import AbandonRead, Action, AddPeer, Failed, FreeBlocks, Loaded, PostRead, Recompute
from pdkv.transfer.admission import Admission
from pdkv.transfer.blocks import BlockRun
from pdkv.transfer.consumer import Consumer
from pdkv.transfer.consumer_state import ConsumerSettings
from pdkv.transfer.counters import Counters
from pdkv.transfer.messages import Descriptor, FailCode, TransferKey, decode
from pdkv.transfer.reference import Reference

STEP_S = 0.5
PREEMPT_LOADING_S = 0.003
REQUEUE_S = 0.5


class State(Enum):
    """Where a request is in the engine."""

    QUEUED = auto()
    LOADING = auto()
    TO_COMPUTE = auto()
    DECODING = auto()
    OVER = auto()


@dataclass(slots=True)
class _Live:
    prompt: str
    plan: RequestPlan
    state: State = State.QUEUED
    ready: bool = False  # its time in the queue has passed
    blocks: list[int] = field(default_factory=list)
    owner: str = ""
    allocations: int = 0
    step: int = 0
    preempted: bool = False


class SimDecode(SimNode):
    """Decodes requests. `ended` counts how they ended: completed, failed, gone, refused."""

    endpoint: Consumer

    def __init__(
        self, wheel: Wheel, fabric: Fabric, clock: WheelClock, plan: Plan, kind: type[Consumer], counters: Counters
    ) -> None:
        super().__init__(wheel, fabric, clock, "D/1", SimMemory(plan.decode_blocks))
        settings = ConsumerSettings(mode=plan.mode, on_failure=plan.on_failure, hold_s=plan.hold_s)
        self.endpoint = kind(clock, self.me, self.descriptor(), settings, counters)
        self.admission = Admission(clock, counters, plan.capacity)
        self._is_fenced = plan.fenced and plan.mode == "pull"
        self.wrong_tokens = 0
        self.ended: Counter[str] = Counter()
        self._live: dict[str, _Live] = {}

    def arrive(self, request_id: str, plan: RequestPlan, reference: Reference) -> None:
        """A request whose prompt prefill has computed, or will."""
        live = self._live[request_id] = _Live(reference.request_id, plan)
        self.endpoint.arrived(request_id, reference, plan.num_tokens)
        if not self.admission.try_enter(request_id):
            self.endpoint.gone(request_id, "too many requests wait for KV")
            self._over(live, "refused")
            return
        self.after(plan.queue_s, lambda: self._is_ready(live))

    def client_gone(self, request_id: str) -> None:
        """The client has disconnected."""
        live = self._live.get(request_id)
        if live is None or live.state is State.OVER:
            return
        if live.state is State.LOADING:
            self._free_cached(live)
        elif live.state is State.DECODING:
            self._free_all(live)
        self.endpoint.gone(request_id, "client gone")
        self._over(live, "gone")
        self._schedule()

    def unfinished(self) -> list[str]:
        """Requests that have neither ended nor failed."""
        return [request_id for request_id, live in self._live.items() if live.state is not State.OVER]

    def endpoint_received(self, frame: bytes) -> None:
        self.endpoint.received(decode(frame))

    # Scheduling.

    def _is_ready(self, live: _Live) -> None:
        live.ready = True
        self._schedule()

    def _schedule(self) -> None:
        """First come, first served, as the pool allows."""
        for request_id, live in list(self._live.items()):
            if not live.ready or live.state not in (State.QUEUED, State.TO_COMPUTE):
                continue
            owner = f"{request_id}#{live.allocations}"
            blocks = self.memory.allocate(live.plan.num_blocks, owner)
            if blocks is None:
                return
            live.blocks, live.owner, live.allocations = blocks, owner, live.allocations + 1
            if live.state is State.TO_COMPUTE:
                self._fill(live, len(blocks))
                self._begin(request_id, live)
            else:
                self._load(request_id, live)

    def _load(self, request_id: str, live: _Live) -> None:
        cached = live.plan.cached_blocks
        self._fill(live, cached)
        live.state = State.LOADING
        wanted = tuple(live.blocks[cached:])
        if live.plan.preempt == "loading" and not live.preempted:
            self.after(PREEMPT_LOADING_S, lambda: self._preempt_loading(request_id, live))
        self.endpoint.allocated(request_id, (BlockRun(cached, wanted),) if wanted else ())

    def _fill(self, live: _Live, count: int) -> None:
        """The first blocks hold the right KV without any transfer: cached, or computed here."""
        for index in range(count):
            self.memory.write(live.blocks[index], true_kv(live.prompt, index))

    def _begin(self, request_id: str, live: _Live) -> None:
        self.admission.leave(request_id)
        live.state = State.DECODING
        self.after(STEP_S, lambda: self._step(request_id, live, live.allocations))

    def _step(self, request_id: str, live: _Live, allocation: int) -> None:
        """Decode one token out of everything that the request's blocks hold."""
        if live.state is not State.DECODING or live.allocations != allocation:
            return
        token = next_token((self.memory.read(block) for block in live.blocks), live.step)
        truth = next_token((true_kv(live.prompt, index) for index in range(len(live.blocks))), live.step)
        self.wrong_tokens += token != truth
        live.step += 1
        if live.step >= live.plan.steps:
            self._free_all(live)
            self.endpoint.finished(request_id)
            self._over(live, "completed")
            self._schedule()
        elif live.plan.preempt == "decoding" and not live.preempted:
            self._free_all(live)
            self._requeue(request_id, live)
        else:
            self.after(STEP_S, lambda: self._step(request_id, live, allocation))

    def _preempt_loading(self, request_id: str, live: _Live) -> None:
        if live.state is State.LOADING:
            self._free_cached(live)
            self._requeue(request_id, live)

    def _requeue(self, request_id: str, live: _Live) -> None:
        again = self.endpoint.preempted(request_id)
        live.preempted, live.ready, live.blocks = True, False, []
        live.state = State.QUEUED if again else State.TO_COMPUTE
        self.after(REQUEUE_S, lambda: self._is_ready(live))

    # What the consumer decides.

    def act(self, action: Action) -> None:
        match action:
            case AbandonRead() if self._is_fenced and action.key in self.posted:
                self.posted[action.key].abandon()
            case PostRead():
                self._post(action, self.owner_of(action.pairs[0].destination), self._read_ended)
            case Loaded():
                self._begin(action.request_id, self._live[action.request_id])
            case Failed():
                live = self._live[action.request_id]
                self._stop_loading(live)
                self._over(live, "failed")
                self._schedule()
            case Recompute():
                live = self._live[action.request_id]
                self._stop_loading(live)
                live.state, live.ready = State.TO_COMPUTE, True
                self._schedule()

    def freed(self, action: FreeBlocks) -> None:
        owner = self.owner_of(action.block_ids[0])
        if owner.split("#")[0] != action.request_id:
            owner = action.request_id  # not its own: the pool will say so
        self.memory.free(action.block_ids, owner)
        self._schedule()

    def rebuilt(self, generation: int, descriptor: Descriptor) -> None:
        self.endpoint.agent_rebuilt(generation, descriptor)

    def peer_added(self, action: AddPeer) -> None:
        if self._is_fenced:
            self.endpoint.reads_fenced(action.peer)

    def _read_ended(self, key: TransferKey, ok: bool, code: FailCode) -> None:
        self.endpoint.read_ended(key, ok, code=code)

    def _stop_loading(self, live: _Live) -> None:
        if live.state is State.LOADING:
            self._free_cached(live)

    def _free_cached(self, live: _Live) -> None:
        self.memory.free(live.blocks[: live.plan.cached_blocks], live.owner)

    def _free_all(self, live: _Live) -> None:
        self.memory.free(live.blocks, live.owner)
        live.blocks = []

    def _over(self, live: _Live, how: str) -> None:
        live.state, live.blocks = State.OVER, []
        self.ended[how] += 1
        for request_id, other in self._live.items():
            if other is live:
                self.admission.leave(request_id)
