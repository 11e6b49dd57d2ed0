"""A simulated process around an endpoint: delivers to it, does its actions, keeps its deadlines, can stop and die."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdkv.testing.faults.fabric import Fabric, Transfer
from pdkv.testing.faults.memory import SimMemory
from pdkv.testing.faults.wheel import Wheel, WheelClock
from pdkv.testing.rules import require
from pdkv.transfer.actions import Action, AddPeer, FreeBlocks, PostRead, PostWrite, RebuildAgent, Send
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.endpoint import Endpoint
from pdkv.transfer.messages import Compatibility, Descriptor, EngineRef, FailCode, Register, TransferKey, encode

REBUILD_S = 0.3  # measured with a transfer in flight
# A wake-up this much after its deadline: sums of floats may end just before it.
LATE_S = 1e-3
COMPATIBILITY = Compatibility(
    model="toy", dtype="bytes", cache_dtype="bytes", layout="LBNHC", block_size=16, connector="simulated/1"
)


def address_of(engine_id: str) -> str:
    """``P/2`` is the second engine at the address ``P``."""
    return engine_id.split("/")[0]


class SimNode:
    """What prefill and decode have in common. Subclasses set `endpoint` and handle the actions of their own side."""

    endpoint: Endpoint

    def __init__(self, wheel: Wheel, fabric: Fabric, clock: WheelClock, engine_id: str, memory: SimMemory) -> None:
        self.address = address_of(engine_id)
        self.alive = True
        self.memory = memory
        self.memory.agent = fabric.new_agent()
        self.me = EngineRef(engine_id, 1)
        self._wheel, self._fabric, self.clock = wheel, fabric, clock
        self.posted: dict[TransferKey, Transfer] = {}
        self._peer_agents: dict[str, int] = {}
        self._stopped_until = 0.0
        self._waiting: list[Callable[[], None]] = []
        self._tick_at: float | None = None
        fabric.attach(self)

    def descriptor(self) -> Descriptor:
        """The agent's number is its metadata."""
        return Descriptor(
            compatibility=COMPATIBILITY, num_blocks=self.memory.num_blocks, metadata=str(self.memory.agent).encode()
        )

    def stop(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after `for_s` seconds. Others go on to read and write its memory."""
        self._stopped_until = max(self._stopped_until, self._wheel.now + for_s)

    def deliver(self, frame: bytes) -> None:
        self.when_running(lambda: self.endpoint_received(frame))

    def endpoint_received(self, frame: bytes) -> None:
        raise NotImplementedError

    def when_running(self, event: Callable[[], None]) -> None:
        """Do it now, or when the process goes on, or never where it is dead. Then do what came of it."""
        if not self.alive:
            return
        if self._wheel.now < self._stopped_until or self._waiting:
            if not self._waiting:
                self._wheel.at(self._stopped_until, self._go_on)
            self._waiting.append(event)
            return
        event()
        self._work()

    def _go_on(self) -> None:
        """What came while the process was stopped, in the order in which it came."""
        if self._wheel.now < self._stopped_until:
            self._wheel.at(self._stopped_until, self._go_on)
            return
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self.when_running(event)

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Something that the process does later."""
        self._wheel.after(delay_s, lambda: self.when_running(event))

    def _work(self) -> None:
        while actions := self.endpoint.take_actions():
            for action in actions:
                self._do(action)
        deadline = self.endpoint.next_deadline()
        if deadline is None:
            return
        at = deadline - self.clock.offset_s + LATE_S
        if self._tick_at is None or at < self._tick_at or self._tick_at <= self._wheel.now:
            self._tick_at = max(at, self._wheel.now)
            self._wheel.at(self._tick_at, lambda: self.when_running(self._tick))

    def _tick(self) -> None:
        self._tick_at = None
        self.endpoint.tick()
        deadline = self.endpoint.next_deadline()
        overdue = deadline is not None and deadline < self.clock.monotonic() - LATE_S
        require(not overdue, f"tick() of {self.me.engine_id} leaves nothing overdue")

    def _do(self, action: Action) -> None:
        match action:
            case Send():
                if isinstance(action.message, Register):
                    self._fabric.owners[action.message.key] = self.owner_of(action.message.runs[0].block_ids[0])
                self._fabric.send(address_of(action.engine_id), encode(action.message))
            case AddPeer():
                self._peer_agents[action.peer.engine_id] = int(action.descriptor.metadata)
                self.peer_added(action)
            case RebuildAgent():
                self._fabric.injected["agent_rebuilt"] += 1
                self.after(REBUILD_S, self.rebuild)
            case FreeBlocks():
                self.freed(action)
            case _:
                self.act(action)

    def owner_of(self, block: int) -> str:
        return self.memory.owner(block) or "nobody"

    def freed(self, action: FreeBlocks) -> None:
        raise NotImplementedError

    def peer_added(self, action: AddPeer) -> None:
        """A peer's agent is known from now on."""

    def act(self, action: Action) -> None:
        raise NotImplementedError

    def rebuilt(self, generation: int, descriptor: Descriptor) -> None:
        raise NotImplementedError

    def rebuild(self) -> None:
        """A new agent takes the place of the old one, and with it go all transfers of the old."""
        self.memory.agent = self._fabric.new_agent()
        self.me = EngineRef(self.me.engine_id, self.me.generation + 1)
        self._peer_agents.clear()
        self.rebuilt(self.me.generation, self.descriptor())

    def _post(
        self, action: PostRead | PostWrite, owner: str, ended: Callable[[TransferKey, bool, FailCode], None]
    ) -> None:
        """Hand a transfer to the fabric; `ended` is told ``(key, ok, code)`` once, or never."""
        peer = self._fabric.node_at(address_of(action.peer.engine_id))
        reads = isinstance(action, PostRead)
        transfer = Transfer(
            self._fabric,
            action.key,
            tuple(BlockPair(*pair) for pair in action.pairs),
            source=peer if reads else self,
            destination=self if reads else peer,
            initiator=self,
            remote_agent=self._peer_agents.get(action.peer.engine_id, -1),
            owner=owner,
            ended=lambda ok: self.when_running(partial(ended, action.key, ok, FailCode.TRANSFER_FAILED)),
        )
        if not self._fabric.post(transfer):
            self.when_running(partial(ended, action.key, False, FailCode.POST_FAILED))
        self.posted[action.key] = transfer
