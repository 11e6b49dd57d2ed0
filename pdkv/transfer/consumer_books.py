"""D's books: requests by id and by transfer, which transfers are alive, and the one way in which each of them ends."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

from pdkv.transfer.actions import AbandonRead, Failed, Recompute
from pdkv.transfer.blocks import block_ids
from pdkv.transfer.clock import Clock, earliest
from pdkv.transfer.consumer_state import ConsumerSettings, Phase, Request
from pdkv.transfer.counters import Counters
from pdkv.transfer.endpoint import Endpoint
from pdkv.transfer.leases import Renewer
from pdkv.transfer.messages import (
    Cancel,
    Descriptor,
    Done,
    EngineRef,
    Fail,
    FailCode,
    Handshake,
    Keyed,
    Renew,
    TransferKey,
)
from pdkv.transfer.reference import Reference

K = TypeVar("K", bound=Keyed)


class ConsumerBooks(Endpoint):
    """What :class:`pdkv.transfer.consumer.Consumer` stands on; the phases are described there."""

    def __init__(
        self,
        clock: Clock,
        me: EngineRef,
        descriptor: Descriptor,
        settings: ConsumerSettings,
        counters: Counters | None,
        rank: int,
    ) -> None:
        super().__init__(clock, me, descriptor, settings, counters)
        self._settings = settings
        self._rank = rank
        self._renewer = Renewer(clock, settings.lease)
        self._requests: dict[str, Request] = {}
        self._by_key: dict[TransferKey, Request] = {}
        self._handshakes: dict[str, tuple[EngineRef, float]] = {}  # whom to ask, and when next
        self._reads: set[TransferKey] = set()  # posted and not ended, wanted or not
        self._alive: dict[int, tuple[TransferKey, str]] = {}  # with P's engine id; by transfer id, lowest first
        self._next_transfer_id = 0
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()  # references, by engine and request of P

    def holders(self) -> tuple[str, ...]:
        """Requests with a transfer or a lease, for the error that refuses a sleep."""
        return tuple(sorted(self._requests))

    def __contains__(self, request_id: str) -> bool:
        """Whether the request waits for KV, or holds a lease after it has come."""
        return request_id in self._requests

    def next_deadline(self) -> float | None:
        requests = self._requests.values()
        return earliest(
            super().next_deadline(),
            self._renewer.next_deadline(),
            min((request.deadline for request in requests), default=None),
            min((r.heard_at + self._settings.silence_s for r in requests if r.phase is not Phase.LOADED), default=None),
            min((due_at for _, due_at in self._handshakes.values()), default=None),
        )

    def _first_use(self, reference: Reference) -> bool:
        used = (reference.engine.engine_id, reference.request_id)
        if used in self._used:
            return False
        self._used[used] = None
        while len(self._used) > self._settings.max_used:
            self._used.popitem(last=False)
        return True

    # Transfers and what is said about them.

    def _new_key(self, reference: Reference) -> TransferKey:
        key = TransferKey(reference.request_id, self._next_transfer_id, self._rank)
        self._alive[key.transfer_id] = key, reference.engine.engine_id
        self._next_transfer_id += 1
        return key

    def _is_anothers(self, message: Keyed) -> bool:
        """Whether the message is about a transfer with another engine than its sender."""
        known = self._alive.get(message.key.transfer_id)
        return known is not None and known != (message.key, message.sender.engine_id)

    def _floor(self) -> int:
        """The lowest transfer id that P may still have to do with."""
        return next(iter(self._alive), self._next_transfer_id)

    def _settle(self, key: TransferKey) -> None:
        if key in self._by_key or key in self._reads or self._outbox.pending(key) or self.quarantine.holds(key):
            return
        self._alive.pop(key.transfer_id, None)

    def _to_prefill(self, kind: type[K], request: Request, **fields: Any) -> K:
        """A message about the request's present transfer."""
        floor, claim, receiver = self._floor(), request.claim, request.reference.engine
        return kind(sender=self.me, receiver=receiver, key=request.key, floor=floor, claim=claim, **fields)

    def _need_peer(self, engine: EngineRef) -> None:
        if self._peers.get(engine) is None and engine.engine_id not in self._handshakes:
            self._handshakes[engine.engine_id] = (engine, self._clock.monotonic())

    def _of_engine(self, engine_id: str) -> list[Request]:
        """Requests that still wait for KV from this engine."""
        return [
            request
            for request in self._requests.values()
            if request.reference.engine.engine_id == engine_id and request.phase is not Phase.LOADED
        ]

    def _work_off(self) -> None:
        """Send the handshakes and renewals that are due."""
        now = self._clock.monotonic()
        needed = {request.reference.engine.engine_id for request in self._requests.values()}
        for engine_id, (engine, due_at) in list(self._handshakes.items()):
            if engine_id not in needed:
                del self._handshakes[engine_id]
            elif due_at <= now:
                self._handshakes[engine_id] = (engine, now + self._settings.handshake_every_s)
                self._send(Handshake(sender=self.me, receiver=engine, descriptor=self.descriptor))
        for key, sequence in self._renewer.take_due():
            self._send(self._to_prefill(Renew, self._by_key[key], sequence=sequence))

    # Ends.

    def _fail(self, request: Request, code: FailCode, reason: str, *, quiet: bool = False, tell: bool = True) -> None:
        """The KV will not come. `quiet`: P has said that it writes nothing; `tell`: P has to know."""
        self.counters.count(f"failed_{code}")
        message = self._to_prefill(Fail, request, code=code, reason=reason[:512]) if tell else None
        self._end(request, message, quiet=quiet)
        self._give_up(request.request_id, code, reason)

    def _give_up(self, request_id: str, code: FailCode, reason: str) -> None:
        if self._settings.on_failure == "recompute":
            self.counters.count("recomputed")
            self._actions.append(Recompute(request_id, code, reason))
        else:
            self.counters.count("requests_failed")
            self._actions.append(Failed(request_id, code, reason))

    def _let_go(self, request: Request) -> None:
        """Loaded, and P's blocks are not needed any more. D's own are the engine's already."""
        request.runs = ()
        self._end(request, self._to_prefill(Done, request))

    def _end(self, request: Request, message: Keyed | None, *, quiet: bool = False) -> None:
        """The one place where a request leaves the books. Its last message is repeated until P has it."""
        self._drop_early_read(request)
        del self._requests[request.request_id], self._by_key[request.key]
        self._renewer.stop(request.key)
        self._outbox.acknowledged(request.key, "REGISTER")
        self._leave_blocks(request, quiet)
        if message is not None:
            self._send(message)
        self._settle(request.key)

    def _drop_early_read(self, request: Request) -> None:
        if request.is_early and request.phase is not Phase.LOADED:
            self.counters.count("early_reads_dropped")
        request.is_early = False

    def _leave_blocks(self, request: Request, quiet: bool) -> None:
        """Blocks that nothing can write to go back; the others wait until that is so (I11)."""
        ids = block_ids(request.runs)
        if not ids:
            return
        written = request.key in self._reads or (
            self._settings.mode == "push" and request.phase is Phase.RUNNING and not quiet
        )
        if written:
            self.quarantine.hold(request.request_id, ids, [request.key])
            if request.key in self._reads:
                self._actions.append(AbandonRead(request.key))
        else:
            self._free(request.request_id, ids)

    def _try_again(self, request: Request, phase: Phase, *, quiet: bool = False) -> None:
        """The transfer is over, the request is not: a new attempt under a new transfer id.

        Args:
            phase: WAITING, without the blocks; or STARTING, with the same, which nothing may write to any more.
        """
        old = request.key
        self._drop_early_read(request)
        if request.phase is Phase.RUNNING and self._settings.mode == "push":
            self._send(self._to_prefill(Cancel, request))
        if phase is Phase.WAITING:
            if request.phase is not Phase.LOADED:
                self._leave_blocks(request, quiet)
            request.runs = ()
        self._outbox.acknowledged(old, "REGISTER")
        request.key = self._new_key(request.reference)
        del self._by_key[old]
        self._by_key[request.key] = request
        self._renewer.rename(old, request.key)
        now = self._clock.monotonic()
        request.deadline = now + (self._settings.wait_s if phase is Phase.WAITING else self._settings.transfer_s)
        request.phase, request.attempts, request.heard_at = phase, request.attempts + 1, now
        self._settle(old)
