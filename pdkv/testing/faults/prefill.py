"""A simulated prefill engine: a pool, prompts computed in chunks, and the real :class:`Producer`."""

from __future__ import annotations

from collections.abc import Callable

from pdkv.errors import StateError
from pdkv.testing.faults.fabric import Fabric
from pdkv.testing.faults.memory import SimMemory, true_kv
from pdkv.testing.faults.node import SimNode
from pdkv.testing.faults.plan import RequestPlan
from pdkv.testing.faults.wheel import Wheel, WheelClock
from pdkv.transfer.actions import Action, FreeBlocks, PostWrite
from pdkv.transfer.blocks import BlockRun
from pdkv.transfer.counters import Counters
from pdkv.transfer.messages import Descriptor, EngineRef, FailCode, TransferKey, decode
from pdkv.transfer.producer import Producer
from pdkv.transfer.reference import Reference

Finished = Callable[[str, Reference], None]


class SimPrefill(SimNode):
    """Computes prompts in order, as its pool allows. `finished` is told of each that is done."""

    endpoint: Producer

    def __init__(
        self,
        wheel: Wheel,
        fabric: Fabric,
        clock: WheelClock,
        engine_id: str,
        num_blocks: int,
        kind: type[Producer],
        counters: Counters,
        finished: Finished,
    ) -> None:
        super().__init__(wheel, fabric, clock, engine_id, SimMemory(num_blocks))
        self.endpoint = kind(clock, self.me, self.descriptor(), counters=counters)
        self._finished = finished
        self._queue: list[tuple[str, RequestPlan]] = []
        self._computing: dict[str, list[int]] = {}

    def start(self, request_id: str, plan: RequestPlan) -> None:
        """Compute the prompt as soon as there are blocks for it."""
        self._queue.append((request_id, plan))
        self._schedule()

    def abort_all(self) -> None:
        """Wants every block back, and computes no further."""
        for request_id in self.endpoint.holders():
            self.endpoint.prefill_aborted(request_id, "prefill needs its blocks")
        for request_id, blocks in self._computing.items():
            self.memory.free(blocks, request_id)
            self.endpoint.prefill_aborted(request_id, "prefill was aborted")
        self._computing.clear()
        self._schedule()

    def rebuild(self) -> None:
        if not self.endpoint.asleep:  # there is no agent then
            super().rebuild()

    def sleep(self, for_s: float) -> None:
        """Destroy the agent, which is the fence, and let go of the memory; come back with another generation."""
        if self._computing:
            return
        try:
            self.endpoint.sleep()
        except StateError:
            self._fabric.injected["sleep_refused"] += 1
            return
        self.memory.agent = self._fabric.new_agent()
        self.after(for_s, self._wake)

    def _wake(self) -> None:
        self.memory.agent = self._fabric.new_agent()
        self.me = EngineRef(self.me.engine_id, self.me.generation + 1)
        self._peer_agents.clear()
        self.endpoint.wake(self.me.generation, self.descriptor())
        self._schedule()

    def _schedule(self) -> None:
        while self._queue and not self.endpoint.asleep:
            request_id, plan = self._queue[0]
            blocks = self.memory.allocate(plan.num_blocks + plan.extra_block, request_id)
            if blocks is None:
                return
            del self._queue[0]
            self._computing[request_id] = blocks
            for chunk in range(plan.chunks):
                at_s = plan.prefill_s * (chunk + 1) / plan.chunks
                self.after(at_s, lambda r=request_id, p=plan, b=blocks, c=chunk: self._compute(r, p, b, c))  # type: ignore[misc]

    def _compute(self, request_id: str, plan: RequestPlan, blocks: list[int], chunk: int) -> None:
        """Write the KV of one prefill chunk; after the last one hand over."""
        if request_id not in self._computing:
            return
        for index in range(len(blocks) * chunk // plan.chunks, len(blocks) * (chunk + 1) // plan.chunks):
            self.memory.write(blocks[index], true_kv(request_id, index))
        if chunk + 1 == plan.chunks:
            del self._computing[request_id]
            self._finished(
                request_id, self.endpoint.prefilled(request_id, (BlockRun(0, tuple(blocks)),), plan.num_tokens)
            )

    def endpoint_received(self, frame: bytes) -> None:
        self.endpoint.received(decode(frame))

    def freed(self, action: FreeBlocks) -> None:
        self.memory.free(action.block_ids, action.request_id)
        self._schedule()

    def act(self, action: Action) -> None:
        assert isinstance(action, PostWrite)
        self._post(action, self._fabric.owners[action.key], self._write_ended)

    def _write_ended(self, key: TransferKey, ok: bool, code: FailCode) -> None:
        self.endpoint.write_ended(key, ok, code=code)

    def rebuilt(self, generation: int, descriptor: Descriptor) -> None:
        self.endpoint.agent_rebuilt(generation, descriptor)
