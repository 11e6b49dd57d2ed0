"""The simulated network: a side channel that may lose, delay, repeat and reorder, and a transport with a NIC's rules.

A transfer is moved in pieces, each block at its own moment, out of whatever the source holds then into the destination,
whoever owns it by then. It stops when an agent of either side is destroyed or rebuilt, and by nothing else: not because
someone gave it up, unless the transport fences READs. It may be refused, fail half-way, or never report its end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Protocol

from pdkv.testing.faults.memory import SimMemory
from pdkv.testing.faults.plan import MESSAGE_FAULTS, TRANSFER_FAULTS, Fault, FaultKind
from pdkv.testing.faults.wheel import Wheel
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.messages import TransferKey

LATENCY_S = 0.001


class Node(Protocol):
    """A process, as the network sees it."""

    address: str
    alive: bool
    memory: SimMemory

    def deliver(self, frame: bytes) -> None: ...


class Fabric:
    """Connects two nodes and injects the faults of a plan. A transfer takes `block_s` seconds for each block."""

    def __init__(self, wheel: Wheel, faults: tuple[Fault, ...], block_s: float) -> None:
        self.block_s = block_s
        self.injected: Counter[str] = Counter()
        self.stray_writes = 0
        self.owners: dict[TransferKey, str] = {}  # of the destination blocks of each registration
        self._wheel = wheel
        self._nodes: dict[str, Node] = {}
        self._messages = self._transfers = self._agents = 0
        self._on_message: dict[int, list[Fault]] = defaultdict(list)
        self._on_transfer: dict[int, list[Fault]] = defaultdict(list)
        self._partitions = [fault for fault in faults if fault.kind is FaultKind.PARTITION]
        for fault in faults:
            if fault.kind in MESSAGE_FAULTS:
                self._on_message[fault.at].append(fault)
            elif fault.kind in TRANSFER_FAULTS:
                self._on_transfer[fault.at].append(fault)

    def attach(self, node: Node) -> None:
        """The node answers at its address from now on."""
        self._nodes[node.address] = node

    def new_agent(self) -> int:
        """A number that no agent had before."""
        self._agents += 1
        return self._agents

    def node_at(self, address: str) -> Node:
        return self._nodes[address]

    def send(self, address: str, frame: bytes) -> None:
        """Send a frame to whoever answers at the address when it arrives."""
        number, self._messages = self._messages, self._messages + 1
        delay_s, copies = LATENCY_S, 1
        for fault in self._on_message[number]:
            self.injected[fault.kind] += 1
            if fault.kind is FaultKind.DROP:
                return
            if fault.kind is FaultKind.DELAY:
                delay_s += fault.amount
            else:
                self._wheel.after(delay_s + fault.amount, lambda: self._deliver(address, frame))
        for fault in self._partitions:
            if fault.at / 10 <= self._wheel.now < fault.at / 10 + fault.amount:
                self.injected[fault.kind] += 1
                return
        for _ in range(copies):
            self._wheel.after(delay_s, lambda: self._deliver(address, frame))

    def _deliver(self, address: str, frame: bytes) -> None:
        node = self._nodes[address]
        if node.alive:
            node.deliver(frame)

    def post(self, transfer: Transfer) -> bool:
        """Start a transfer; False where it is not taken."""
        number, self._transfers = self._transfers, self._transfers + 1
        faults = {fault.kind: fault for fault in self._on_transfer[number]}
        self.injected.update(fault.kind for fault in faults.values())
        if FaultKind.POST_FAILS in faults or not transfer.can_start():
            return False
        transfer.start(self._wheel, faults)
        return True


class Transfer:
    """One READ or WRITE in flight.

    Args:
        source, destination: the two nodes; `initiator` is one of them.
        remote_agent: the other side's agent, as its metadata said.
        owner: who owns the destination blocks.
        ended: called with whether it worked, unless it never reports.
    """

    def __init__(
        self,
        fabric: Fabric,
        key: TransferKey,
        pairs: tuple[BlockPair, ...],
        *,
        source: Node,
        destination: Node,
        initiator: Node,
        remote_agent: int,
        owner: str,
        ended: Callable[[bool], None],
    ) -> None:
        self._fabric, self._key, self._pairs = fabric, key, pairs
        self._source, self._destination, self._initiator = source, destination, initiator
        self._remote = destination if initiator is source else source
        self._local_agent, self._remote_agent = initiator.memory.agent, remote_agent
        self._owner, self._ended = owner, ended
        self._is_over = False

    def can_start(self) -> bool:
        """Whether both agents are the ones that it was made for."""
        return self._remote.alive and self._remote.memory.agent == self._remote_agent

    def start(self, wheel: Wheel, faults: dict[FaultKind, Fault]) -> None:
        """Plan the pieces and the end."""
        begin_s = LATENCY_S
        reports = FaultKind.NEVER_COMPLETES not in faults
        for kind in (FaultKind.SLOW, FaultKind.NEVER_COMPLETES):
            if kind in faults:
                begin_s += faults[kind].amount
        moved = self._pairs
        ok = FaultKind.TRANSFER_FAILS not in faults
        for pair in self._pairs:
            bad = self._source.memory.is_bad(pair.source) or self._destination.memory.is_bad(pair.destination)
            ok = ok and not bad
        if not ok:
            moved = self._pairs[: len(self._pairs) // 2]
        for index, pair in enumerate(moved):
            wheel.after(begin_s + index * self._fabric.block_s, lambda pair=pair: self._move(pair))  # type: ignore[misc]
        if reports:
            wheel.after(begin_s + len(moved) * self._fabric.block_s, lambda: self._end(ok))

    def abandon(self) -> None:
        """Move nothing more, and say that it has ended; nothing where it has said so already."""
        if not self._is_over:
            self._is_over = True
            self._ended(False)

    def _same_agents(self) -> bool:
        initiator, remote = self._initiator, self._remote
        return (
            initiator.alive
            and remote.alive
            and initiator.memory.agent == self._local_agent
            and remote.memory.agent == self._remote_agent
        )

    def _move(self, pair: BlockPair) -> None:
        if self._is_over or not self._same_agents():
            return
        memory = self._destination.memory
        if memory.owner(pair.destination) != self._owner:
            self._fabric.stray_writes += 1
        memory.write(pair.destination, self._source.memory.read(pair.source))

    def _end(self, ok: bool) -> None:
        """A peer that died leaves the transfer in progress for ever; an agent that was rebuilt fails it."""
        if self._is_over or not self._initiator.alive or not self._remote.alive:
            return
        self._is_over = True
        if self._initiator.memory.agent == self._local_agent:
            self._ended(ok and self._same_agents())
