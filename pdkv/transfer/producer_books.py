"""P's books: leases, registrations and WRITEs, who may end what, and the one way in which each of them ends."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

from pdkv.transfer.blocks import block_ids
from pdkv.transfer.clock import Clock
from pdkv.transfer.counters import Counters
from pdkv.transfer.endpoint import Endpoint, EndpointSettings
from pdkv.transfer.issued import IssuedReferences, ReferenceSettings
from pdkv.transfer.leases import Lease, LeaseTable
from pdkv.transfer.messages import (
    Ack,
    Descriptor,
    EngineRef,
    Fail,
    FailCode,
    Keyed,
    LeaseState,
    Register,
    TransferKey,
)
from pdkv.transfer.peers import UsedTransfers


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings(EndpointSettings):
    """`max_early`: registrations that may wait for their prefill; `early_s`: for how long at most, in seconds."""

    max_early: int = 4096
    early_s: float = 600.0
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)


@dataclass(slots=True)
class Early:
    """A registration that came before its prefill had ended."""

    register: Register
    until: float


class ProducerBooks(Endpoint):
    """What :class:`pdkv.transfer.producer.Producer` stands on."""

    def __init__(
        self,
        clock: Clock,
        me: EngineRef,
        descriptor: Descriptor,
        settings: ProducerSettings | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._settings = settings or ProducerSettings()
        super().__init__(clock, me, descriptor, self._settings, counters)
        self.asleep = False
        self._leases = LeaseTable(clock, self._settings.lease)
        self._references = IssuedReferences(clock, self.counters, self._settings.reference)
        self._used = UsedTransfers()
        self._early: dict[TransferKey, Early] = {}
        self._writes: dict[TransferKey, Register] = {}
        self._takers: dict[str, dict[TransferKey, EngineRef]] = defaultdict(dict)  # who renewed, by request
        self._owed: dict[TransferKey, list[Keyed]] = defaultdict(list)  # to be acknowledged when the WRITE has ended
        self._unwanted: OrderedDict[str, set[int]] = OrderedDict()  # given up by D before P had the blocks

    def holders(self) -> tuple[str, ...]:
        """Request ids whose blocks are held, for the error that refuses a sleep."""
        return tuple(sorted({*self._leases.request_ids(), *(key.request_id for key in self._writes)}))

    def _transfer_over(self, message: Keyed) -> None:
        """D wants nothing more of this transfer. Acknowledge as soon as nothing of it is in flight."""
        key = message.key
        if self._is_another_engines(message):
            self.counters.count("contested_transfers")
            self._ack(message)
            return
        self._early.pop(key, None)
        self._outbox.forget(key)
        if key in self._writes:
            self._owed[key].append(message)
            return
        self._used.mark(message.sender.engine_id, key.transfer_id)
        self._ack(message)

    def _is_another_engines(self, message: Keyed) -> bool:
        """Whether the transfer of this key was registered by another engine."""
        early, write = self._early.get(message.key), self._writes.get(message.key)
        register = write if early is None else early.register
        return register is not None and register.sender.engine_id != message.sender.engine_id

    def _rank_ended(self, request_id: str, rank: int) -> None:
        """This rank of D wants no more of the request. Before prefill has ended, that is remembered."""
        state = self._leases.state(request_id)
        if state is LeaseState.UNKNOWN:
            self._unwanted.setdefault(request_id, set()).add(rank)
            while len(self._unwanted) > self._settings.max_early:
                self._unwanted.popitem(last=False)
        elif request_id not in self._leases:
            self.counters.count("late_ends")
        elif self._leases.rank_ended(request_id, rank):
            self._end_lease(request_id, "leases_ended_by_decode")

    def _end_lease(self, request_id: str, why: str) -> None:
        """The one place where blocks under a lease are let go."""
        lease = self._leases.end(request_id)
        if lease is None:
            return
        self.counters.count(why)
        self._takers.pop(request_id, None)
        self._references.over(request_id)
        self._free_or_hold(lease)

    def _free_or_hold(self, lease: Lease) -> None:
        running = [key for key in self._writes if key.request_id == lease.request_id]
        if running:
            self.quarantine.hold(lease.request_id, block_ids(lease.blocks), running)
        else:
            self._free(lease.request_id, block_ids(lease.blocks))

    def _fail_early(self, request_id: str, code: FailCode, reason: str) -> None:
        for key, early in [item for item in self._early.items() if item[0].request_id == request_id]:
            del self._early[key]
            self._fail(early.register, code, reason)

    def _fail(self, message: Keyed, code: FailCode, reason: str) -> None:
        """Tell D that this transfer will not be, and never start it."""
        self.counters.count(f"failed_{code}")
        self._used.mark(message.sender.engine_id, message.key.transfer_id)
        self._send(Fail(sender=self.me, receiver=message.sender, key=message.key, code=code, reason=reason[:512]))

    def _is_refused(self, message: Keyed) -> bool:
        """Whether D may not have what it asks for, by the state of P or by its own right; D is told."""
        if self.asleep:
            self._refuse(message, FailCode.ASLEEP, "the engine is asleep")
        elif message.receiver != self.me:
            self._refuse(message, FailCode.STALE_GENERATION, f"this engine is at generation {self.me.generation} now")
        elif (refusal := self._references.check(message)) is not None:
            self._refuse(message, *refusal)
        else:
            return False
        return True

    def _refuse(self, message: Keyed, code: FailCode, reason: str) -> None:
        """Say no, once for each time that D asks; D repeats what matters."""
        self.counters.count(f"refused_{code}")
        if isinstance(message, Ack):
            return
        fail = Fail(sender=self.me, receiver=message.sender, key=message.key, code=code, reason=reason)
        self._send_once(fail)
