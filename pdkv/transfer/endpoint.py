"""What P and D have in common: identity, actions for the host, repetition, acknowledgement, quarantine, time."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdkv.transfer.actions import Action, FreeBlocks, RebuildAgent, Send
from pdkv.transfer.clock import Clock, earliest
from pdkv.transfer.counters import Counters
from pdkv.transfer.leases import LeaseSettings
from pdkv.transfer.messages import Ack, Compatibility, Descriptor, EngineRef, Keyed, Message, TransferKey, type_of
from pdkv.transfer.outbox import Outbox, OutboxSettings
from pdkv.transfer.peers import Peers, why_incompatible
from pdkv.transfer.quarantine import Quarantine, QuarantineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """Settings that P and D share; see each class."""

    lease: LeaseSettings = field(default_factory=LeaseSettings)
    outbox: OutboxSettings = field(default_factory=OutboxSettings)
    quarantine: QuarantineSettings = field(default_factory=QuarantineSettings)


class Endpoint:
    """One rank of an engine, as far as transfers go. No thread, no socket, no sleep: events in, actions out.

    The host calls a method for each event, calls :meth:`tick` at the latest at :meth:`next_deadline`, and after each
    call does what :meth:`take_actions` returns, in order. All calls come from one thread at a time.

    Args:
        me: engine id (one per rank, new at each start) and generation.
        descriptor: what peers must know of this engine.
    """

    def __init__(
        self,
        clock: Clock,
        me: EngineRef,
        descriptor: Descriptor,
        settings: EndpointSettings,
        counters: Counters | None = None,
    ) -> None:
        self.me = me
        self.descriptor = descriptor
        self.counters = counters or Counters()
        self._clock = clock
        self._peers = Peers()
        self._outbox = Outbox(clock, self.counters, settings.outbox)
        self.quarantine = Quarantine(clock, self.counters, settings.quarantine)
        self._actions: list[Action] = []

    def take_actions(self) -> tuple[Action, ...]:
        """What is to be done since the last call."""
        actions, self._actions = tuple(self._actions), []
        return actions

    def tick(self) -> None:
        """Do what is due by now. Harmless at any time."""
        again, given_up = self._outbox.take_due()
        self._actions.extend(again)
        for key in given_up:
            self._settle(key)
        if (reason := self.quarantine.wants_rebuild()) is not None:
            self._actions.append(RebuildAgent(reason))

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do next, on the clock that was given; an idle engine too must call it."""
        return earliest(self._outbox.next_deadline(), self.quarantine.next_deadline())

    def holders(self) -> tuple[str, ...]:
        """Requests that hold blocks, or a lease on the other side's."""
        raise NotImplementedError

    def knows(self, engine_id: str) -> bool:
        """Whether the engine has been met and not been lost since."""
        return self._peers.newest(engine_id) is not None

    def awaits_ack(self, message: Ack) -> bool:
        """Whether this answers something that is being repeated here."""
        return self._outbox.pending(message.key)

    def _settle(self, key: TransferKey) -> None:
        """Something about this transfer is over; forget what need not be remembered."""

    def _why_incompatible(self, theirs: Compatibility) -> str | None:
        return why_incompatible(self.descriptor.compatibility, theirs)

    def _learn(self, ref: EngineRef, descriptor: Descriptor) -> None:
        if (add := self._peers.learn(ref, descriptor)) is not None:
            self._actions.append(add)

    def _send(self, message: Message) -> None:
        send = Send(message.receiver.engine_id, message)
        self._actions.append(send)
        if isinstance(message, Keyed) and message.reliable:
            self._outbox.put(send, message)

    def _send_once(self, message: Message) -> None:
        """Without repetition, whatever its type: an answer, which is given again when the question is."""
        self._actions.append(Send(message.receiver.engine_id, message))

    def _ack(self, message: Keyed) -> None:
        self._send(Ack(sender=self.me, receiver=message.sender, key=message.key, of=type_of(message)))

    def _free(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        if block_ids:
            self._actions.append(FreeBlocks(request_id, block_ids))
