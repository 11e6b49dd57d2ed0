"""An engine of the process harness: a pool, a cache, the toy model, and a real session over a real transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pdkv import lifecycle
from pdkv.errors import StateError
from pdkv.registry import find_transport
from pdkv.testing.faults.memory import SimMemory
from pdkv.testing.faults.processes.asleep import EngineConnector, Strike, lend, put_to_sleep
from pdkv.testing.faults.processes.toy import BLOCK_TOKENS, NUM_BLOCKS, ToyCache, num_blocks_of
from pdkv.transfer.actions import Failed, FreeBlocks, Loaded, Recompute
from pdkv.transfer.blocks import BlockRun
from pdkv.transfer.consumer_state import ConsumerSettings
from pdkv.transfer.hosting import LocalHost
from pdkv.transfer.leases import LeaseSettings
from pdkv.transfer.messages import Compatibility
from pdkv.transfer.outbox import OutboxSettings
from pdkv.transfer.producer_books import ProducerSettings
from pdkv.transfer.quarantine import QuarantineSettings
from pdkv.transfer.reference import Reference
from pdkv.transfer.session import Role, Session, SessionSettings
from pdkv.transfer.sidechannel import SideChannel, SideChannelSettings
from pdkv.transfer.transport import Transport

COMPATIBILITY = Compatibility(
    model="toy", dtype="float32", cache_dtype="auto", layout="LBNHC", block_size=BLOCK_TOKENS, connector="processes/1"
)
#: A loaded request is looked at again after so many steps, in case something still writes.
STEPS = 10
#: As in production, but a scenario takes seconds, not minutes.
LEASE = LeaseSettings(duration_s=4.0, extension_s=3.0, renew_every_s=0.5, retry_every_s=0.2, margin_s=0.1)
OUTBOX = OutboxSettings(retry_after_s=0.2, longest_interval_s=1.0, give_up_after_s=8.0)
QUARANTINE = QuarantineSettings(rebuild_after_s=1.5)


def settings_for(mode: Literal["pull", "push"]) -> SessionSettings:
    """Short times throughout."""
    shared: dict[str, Any] = {"lease": LEASE, "outbox": OUTBOX, "quarantine": QUARANTINE}
    decode = ConsumerSettings(
        mode=mode, wait_s=10.0, transfer_s=6.0, silence_s=3.0, handshake_every_s=0.3, **shared
    )  # fmt: skip
    return SessionSettings(prefill=ProducerSettings(early_s=10.0, **shared), decode=decode, close_s=2.0)


@dataclass(slots=True)
class _Live:
    """A request on D."""

    prompt: str
    num_tokens: int
    blocks: list[int] = field(default_factory=list)
    held: bool = False
    steps_left: int | None = None


class EngineProcess:
    """Each `do_` method is a command of :func:`pdkv.testing.child.serve`; :meth:`idle` is the engine's step."""

    def __init__(self, engine_id: str, role: Role, mode: Literal["pull", "push"], transport: str, peers: str) -> None:
        self._memory = SimMemory(NUM_BLOCKS)
        self._toy = ToyCache()
        self._channel = SideChannel(engine_id, SideChannelSettings.from_values(peers=peers))
        self._make_transport = find_transport(transport)
        self._transports: list[Transport] = []
        host = LocalHost(self._transport, self._toy.cache, engine_id, COMPATIBILITY)
        self._session = Session(host, self._channel, role=role, settings=settings_for(mode))
        self._requests: dict[str, _Live] = {}
        self._results: dict[str, list[Any]] = {}
        self._connector = EngineConnector(self._session, lambda: tuple(self._requests), self._drop_decoding)

    # Commands.

    def do_address(self) -> str:
        return str(self._channel.address)

    def do_prefill(self, request_id: str, prompt: str, num_tokens: int) -> dict[str, Any]:
        """Compute a prompt; the reference to hand to D."""
        self._require_running()
        blocks = self._memory.allocate(num_blocks_of(num_tokens), request_id)
        if blocks is None:
            raise MemoryError("the pool of P is empty")
        for index, block in enumerate(blocks):
            self._toy.write(prompt, index, block)
        return self._session.offer(request_id, [BlockRun(0, tuple(blocks))], num_tokens).to_params()

    def do_arrive(self, request_id: str, reference: dict[str, Any], prompt: str, num_tokens: int, held: bool) -> None:
        """A request reaches D; where it is `held` it has no blocks until :meth:`do_allocate`."""
        self._require_running()
        self._requests[request_id] = _Live(prompt, num_tokens, held=held)
        self._session.arrived(request_id, Reference.from_params(reference), num_tokens)

    def do_allocate(self, request_id: str) -> None:
        self._requests[request_id].held = False
        self._step()

    def do_knows_lease(self, request_id: str) -> bool:
        """Whether P has told D that it keeps the blocks, so that D will read as soon as it has some of its own."""
        consumer = self._session._consumer
        request = None if consumer is None else consumer._requests.get(request_id)
        return consumer is not None and request is not None and bool(consumer._renewer.guaranteed_until(request.key))

    def do_results(self) -> dict[str, list[Any]]:
        """What has become of requests: ``["completed", token, token]`` or ``["failed", code]``."""
        return self._results

    def do_state(self) -> dict[str, Any]:
        return {"leaked": self._memory.num_leaked, "unfinished": len(self._requests), **self._session.metrics()}

    def do_sleep(self, mode: lifecycle.SleepMode, deadline_s: float, strike: list[Any] | None = None) -> dict[str, Any]:
        """Give the memory back. The engine steps while it waits, so that its requests come to their end."""
        self._connector.strike = Strike(*strike) if strike else None
        report = put_to_sleep(self._toy.cache, self._connector, self.idle, mode, deadline_s)
        return {**report, "kept_by_peers": self._num_keeping()}

    def do_wake(self, strike: list[Any] | None = None) -> int:
        """Take memory again; the generation."""
        self._connector.strike = Strike(*strike) if strike else None
        return lifecycle.wake(self._toy.cache, self._connector).generation

    def do_lend(self, strike: list[Any] | None = None) -> dict[str, Any]:
        """Lend the memory to a weight update and take it back."""
        self._connector.strike = Strike(*strike) if strike else None
        return {**lend(self._toy.cache, self._connector), "kept_by_peers": self._num_keeping()}

    def do_lifecycle(self) -> str:
        """The state of the cache."""
        return str(lifecycle.state(self._toy.cache))

    # The engine.

    def _transport(self) -> Transport:
        self._transports.append(self._make_transport())
        return self._transports[-1]

    def _num_keeping(self) -> int:
        """How many peers, so far, have not let go of memory that they had mapped when they were told to."""
        return sum(int(made.describe_state().get("drops_unacknowledged", 0)) for made in self._transports)

    def _require_running(self) -> None:
        if (state := lifecycle.state(self._toy.cache)) is not lifecycle.State.RUNNING:
            raise StateError(f"the engine is {state}, so it takes no request; wake it first.")

    def _drop_decoding(self) -> None:
        """End the requests that have their KV; the session ends the others."""
        for request_id, live in list(self._requests.items()):
            if live.steps_left is not None:
                self._results[request_id] = ["failed", "dropped"]
                self._over(request_id, live)

    def idle(self) -> None:
        """One step."""
        for event in self._session.poll():
            match event:
                case Loaded():
                    self._loaded(event.request_id)
                case Failed() | Recompute():
                    self._requests.pop(event.request_id, None)
                    self._results[event.request_id] = ["failed", str(event.code)]
                case FreeBlocks():
                    self._free(event.block_ids, event.request_id)
        self._step()

    def _step(self) -> None:
        for request_id, live in list(self._requests.items()):
            if live.steps_left is not None:
                live.steps_left -= 1
                if live.steps_left <= 0:
                    self._complete(request_id, live)
            elif not live.blocks and not live.held:
                self._allocate(request_id, live)

    def _allocate(self, request_id: str, live: _Live) -> None:
        blocks = self._memory.allocate(num_blocks_of(live.num_tokens), request_id)
        if blocks is not None:
            live.blocks = blocks
            self._session.allocated(request_id, [BlockRun(0, tuple(blocks))])

    def _loaded(self, request_id: str) -> None:
        live = self._requests[request_id]
        live.steps_left = STEPS
        self._results[request_id] = ["decoding", self._toy.token(live.blocks, 0)]

    def _complete(self, request_id: str, live: _Live) -> None:
        token = self._toy.token(live.blocks, 1)
        self._results[request_id] = ["completed", self._results[request_id][1], token]
        self._over(request_id, live)

    def _over(self, request_id: str, live: _Live) -> None:
        del self._requests[request_id]
        self._session.finished(request_id)
        self._free(tuple(live.blocks), request_id)

    def _free(self, blocks: tuple[int, ...], request_id: str) -> None:
        """Back to the pool, which refuses what does not belong to the request."""
        self._memory.free(blocks, request_id)
        if not self._toy.cache.is_released:
            self._toy.poison(blocks)
