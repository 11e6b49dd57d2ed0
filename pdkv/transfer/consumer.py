"""D: fetches the KV of requests from P, and gives every block back whatever becomes of the request.

A request on D::

    WAITING ──allocated──▶ STARTING ──peer known, lease alive──▶ RUNNING ──▶ (CONFIRMING) ──▶ LOADED ──▶ over
       ▲                                                            │                           │
       ╰────────────────────── preempted (the lease lives) ─────────┴───────────────────────────╯

    from every phase: gone, finished, FAIL or ABORT from P, lease lost, P silent, deadline passed ──▶ over

The lease is renewed from WAITING on. In pull a READ is posted only once P has said that the lease lives, and what it
brought counts only if P is known to have kept the blocks until it had ended; else P is asked first (CONFIRMING). In
push REGISTER is sent and P's DONE awaited. LOADED lasts as long as `hold_s` says, in case the request is preempted.

An *early read* does not wait for P's first word: P holds what a reference names from before the reference was made, so
its word that the lease lives, whenever it comes, is about all the time until then. Until it has come nothing of what
was read counts, nor that it could not be read; where P says no, it is thrown away. Only a transport that fences READs
(:meth:`pdkv.transfer.transport.Transport.fences_reads`) is asked for one: with others P must have its say before (I10).

When a request is over while its transfer may still write, the blocks wait in quarantine (I11).
"""

from __future__ import annotations

from collections.abc import Sequence

from pdkv.errors import ProtocolError, StateError
from pdkv.transfer.blocks import BlockRun, block_ids, require_committed
from pdkv.transfer.clock import Clock
from pdkv.transfer.consumer_loading import ConsumerLoading
from pdkv.transfer.consumer_state import ConsumerSettings, Phase, Request
from pdkv.transfer.counters import Counters
from pdkv.transfer.messages import (
    Abort,
    Ack,
    AnyMessage,
    Descriptor,
    Done,
    EngineRef,
    Fail,
    FailCode,
    Keyed,
    LeaseState,
    Refuse,
    Renewed,
    TransferKey,
    Welcome,
)
from pdkv.transfer.reference import Reference


class Consumer(ConsumerLoading):
    """One rank of D. See :class:`pdkv.transfer.endpoint.Endpoint` for how it is driven.

    Request ids in calls and actions are D's own.
    """

    def __init__(
        self,
        clock: Clock,
        me: EngineRef,
        descriptor: Descriptor,
        settings: ConsumerSettings | None = None,
        counters: Counters | None = None,
        *,
        rank: int = 0,
    ) -> None:
        super().__init__(clock, me, descriptor, settings or ConsumerSettings(), counters, rank)
        self._owed: dict[tuple[str, str], Abort] = {}  # by engine and request of P: acknowledged when no READ runs

    # From the engine.

    def arrived(self, request_id: str, reference: Reference, num_tokens: int) -> None:
        """A request whose prompt P has computed, or will, has reached this engine; its lease is renewed from now on.

        Args:
            num_tokens: tokens of the prompt as D counts them.

        Raises:
            StateError: the request is here already.
        """
        if request_id in self._requests:
            raise StateError(f"request {request_id!r} is here already; request ids must differ.")
        self.counters.count("requests")
        if not self._first_use(reference):
            self._give_up(request_id, FailCode.REPLAYED, "the transfer parameters were used before; prefill it again")
            return
        now = self._clock.monotonic()
        key = self._new_key(reference)
        claim = reference.claim(key.transfer_id)
        request = Request(request_id, reference, key, claim, deadline=now + self._settings.wait_s, heard_at=now)
        self._requests[request_id] = self._by_key[key] = request
        if num_tokens != reference.num_tokens:
            reason = f"the prompt has {num_tokens} tokens on D and {reference.num_tokens} on P"
            self._fail(request, FailCode.BAD_BLOCKS, reason)
            return
        self._renewer.start(key)
        self._need_peer(reference.engine)
        self._work_off()

    def allocated(self, request_id: str, runs: Sequence[BlockRun]) -> None:
        """The engine has blocks for the indices that it lacks; none at all where its prefix cache has everything.

        From here on the blocks are the connector's until Loaded or FreeBlocks. A request that is over already gets
        its blocks back at once.
        """
        request = self._requests.get(request_id)
        if request is None or request.phase is not Phase.WAITING:
            self._free(request_id, block_ids(runs))
            return
        request.runs, request.phase = tuple(runs), Phase.STARTING
        request.deadline = self._clock.monotonic() + self._settings.transfer_s
        try:
            require_committed(runs, self.descriptor.num_blocks)
        except ProtocolError as error:
            self._fail(request, FailCode.BAD_BLOCKS, str(error))
            return
        self._advance(request)
        self._work_off()

    def gone(self, request_id: str, reason: str) -> None:
        """The request is over before its KV was used: client gone, refused for its length or for lack of room."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.phase is Phase.LOADED:
            self._let_go(request)
            return
        self.counters.count("requests_gone")
        self._end(request, self._to_prefill(Abort, request, reason=reason[:512]))

    def finished(self, request_id: str) -> None:
        """The engine has finished with the request. Idempotent; only a lease that is still held ends by it."""
        self.gone(request_id, "finished")

    def abort_all(self, code: FailCode, reason: str) -> None:
        """End every request here, those whose KV has arrived without a word to the engine, the others as failed."""
        for request in list(self._requests.values()):
            if request.phase is Phase.LOADED:
                self._let_go(request)
            else:
                self._fail(request, code, reason)

    def preempted(self, request_id: str) -> bool:
        """The engine took the request's blocks away. True: call `allocated` again; False: compute it here (counted).

        Blocks of a loaded request are the engine's; those of a running transfer come back in FreeBlocks.
        """
        request = self._requests.get(request_id)
        if request is None:
            self.counters.count("preempted_without_lease")
            return False
        if request.phase is Phase.WAITING:
            return True
        lives = self._kept_until(request, self._clock.monotonic())
        if request.attempts >= self._settings.max_attempts or (request.phase is Phase.LOADED and not lives):
            self.counters.count("preempted_without_lease")
            self.gone(request_id, "preempted")
            return False
        self.counters.count("read_again")
        self._try_again(request, Phase.WAITING)
        self._work_off()
        return True

    # From the transport.

    def received(self, message: AnyMessage) -> None:
        """A message arrived; it may be late, repeated, or from an engine that has taken another's place."""
        if message.receiver.engine_id != self.me.engine_id:
            self.counters.count("unexpected_messages")  # for the engine that was here before
            return
        match message:
            case Welcome():
                self._welcome(message)
            case Refuse():
                self._refused(message)
            case Keyed() if self._is_anothers(message):
                self.counters.count("impostors")
            case Renewed():
                self._renewed(message)
            case Ack():
                self._acknowledged(message)
            case Done() | Fail():
                self._from_prefill(message)
            case Abort():
                self._aborted_by_prefill(message)
            case _:
                self.counters.count("unexpected_messages")
        self._work_off()

    def read_ended(
        self, key: TransferKey, ok: bool, *, code: FailCode = FailCode.TRANSFER_FAILED, reason: str = ""
    ) -> None:
        """A READ has ended: every byte has arrived (`ok`), or it failed, or the transport did not take it.

        Args:
            code, reason: of what was not `ok`; POST_FAILED where the transport did not take it.
        """
        if key not in self._reads:
            self.counters.count("late_read_ends")
            return
        self._reads.discard(key)
        self._actions.extend(self.quarantine.ended(key))
        self._pay_acks()
        request = self._by_key.get(key)
        if request is None:
            self._settle(key)
        elif ok or (request.is_early and not self._is_answered(request)):
            request.phase, request.read_ended_at = Phase.CONFIRMING, self._clock.monotonic()
            request.read_failure = None if ok else (code, reason or "the READ failed")
            self._confirm(request)
        else:
            self._fail(request, code, reason or "the READ failed")
        self._work_off()

    def reads_fenced(self, peer: EngineRef) -> None:
        """The transport has reached this peer and fences READs from it: they may be posted early from now on."""
        self._peers.note_fence(peer)

    def peer_lost(self, engine_id: str, code: FailCode, reason: str, *, generation: int | None = None) -> None:
        """Nothing can be had from this engine: all requests that wait for it fail now, each by the policy.

        With a `generation`: those that wait for what it was in that one, or before.
        """
        self._peers.forget(engine_id)
        for request in self._of_engine(engine_id):
            if generation is None or request.reference.engine.generation <= generation:
                self._fail(request, code, reason)
        waits = self._handshakes.get(engine_id)
        if waits is not None and (generation is None or waits[0].generation <= generation):
            del self._handshakes[engine_id]

    def agent_rebuilt(self, generation: int, descriptor: Descriptor) -> None:
        """The old agent is destroyed and a new one registered, as `generation`: nothing old is written any more."""
        self.me, self.descriptor = EngineRef(self.me.engine_id, generation), descriptor
        self._peers.clear()
        self._reads.clear()
        self._actions.extend(self.quarantine.agent_rebuilt())
        self._pay_acks()
        for request in list(self._requests.values()):
            self._need_peer(request.reference.engine)
            if request.phase is not Phase.RUNNING:
                continue
            if request.attempts < self._settings.max_attempts:
                self._try_again(request, Phase.STARTING, quiet=True)
            else:
                self._fail(request, FailCode.TRANSFER_FAILED, "the agent was rebuilt under the transfer", quiet=True)
        for key, _ in list(self._alive.values()):
            self._settle(key)
        self._work_off()

    def tick(self) -> None:
        now = self._clock.monotonic()
        for request in list(self._requests.values()):
            if request.phase is Phase.LOADED:
                if request.deadline <= now:
                    self._let_go(request)
            elif request.deadline <= now:
                self._fail(request, FailCode.TIMED_OUT, f"no KV in time ({request.phase.name.lower()})")
            elif request.heard_at + self._settings.silence_s <= now:
                self._fail(request, FailCode.PEER_LOST, f"prefill has not answered for {self._settings.silence_s} s")
        super().tick()
        self._work_off()

    # Messages.

    def _welcome(self, message: Welcome) -> None:
        engine_id = message.sender.engine_id
        why_not = self._why_incompatible(message.descriptor.compatibility)
        if why_not is not None:
            self.peer_lost(engine_id, FailCode.INCOMPATIBLE, why_not)
            return
        self._learn(message.sender, message.descriptor)
        for request in self._of_engine(engine_id):
            if message.sender.generation > request.reference.engine.generation:
                self._fail(request, FailCode.STALE_GENERATION, "prefill has replaced its memory since", quiet=True)
            elif self._peers.get(request.reference.engine) is not None:
                self._handshakes.pop(engine_id, None)
                self._advance(request)

    def _refused(self, message: Refuse) -> None:
        """The carrier has seen to it that the sender may speak for whom was meant: it is at the same address."""
        known = self._peers.newest(message.meant.engine_id)
        if known is not None and known.ref.generation > message.meant.generation:
            self.counters.count("late_refusals")  # of memory that has been replaced since
            return
        # One that went to sleep may be awake again by the time its word is read, and requests name what it is now.
        generation: int | None = message.meant.generation
        if message.code is FailCode.WRONG_ENGINE:
            generation = None
            for key in self._outbox.forget_engine(message.meant.engine_id):
                self._settle(key)
        self.peer_lost(message.meant.engine_id, message.code, message.reason, generation=generation)

    def _renewed(self, message: Renewed) -> None:
        request = self._by_key.get(message.key)
        live = message.state is LeaseState.LIVE
        asked_at = self._renewer.answered(message.key, message.sequence, message.remaining_s if live else None)
        if request is None or asked_at is None:
            self.counters.count("late_renewals")
            return
        request.heard_at = max(request.heard_at, asked_at)
        if live:
            request.live_sequence = max(request.live_sequence, message.sequence)
            self._advance(request)
        elif message.state is LeaseState.ENDED or message.sequence > request.live_sequence > -1 or self._is_pull:
            self._lease_lost(request)

    def _lease_lost(self, request: Request) -> None:
        if request.phase is Phase.LOADED:
            self._let_go(request)
        else:
            self._fail(request, FailCode.LEASE_LOST, "prefill does not hold the blocks of this request any more")

    def _acknowledged(self, message: Ack) -> None:
        if not self._outbox.acknowledged(message.key, message.of, message.sender.engine_id):
            self.counters.count("late_acks")
        if message.of in ("FAIL", "ABORT", "CANCEL") and not self._is_pull:
            self._actions.extend(self.quarantine.ended(message.key))
        self._settle(message.key)

    def _from_prefill(self, message: Done | Fail) -> None:
        key, request = message.key, self._by_key.get(message.key)
        self._ack(message)
        if not self._is_pull:
            self._actions.extend(self.quarantine.ended(key))
        if request is None or request.phase is Phase.LOADED:
            self.counters.count("late_ends")
            self._settle(key)
        elif isinstance(message, Fail):
            self._fail(request, message.code, message.reason, quiet=True)
        elif request.phase is Phase.RUNNING and not self._is_pull:
            self._arrived_whole(request)

    def _aborted_by_prefill(self, message: Abort) -> None:
        """P wants the blocks back, whichever attempt it knows of. It may have them when no READ of any is in flight."""
        self._owed[message.sender.engine_id, message.key.request_id] = message
        for request in list(self._requests.values()):
            if request.key.request_id != message.key.request_id or request.reference.engine != message.sender:
                continue
            if request.phase is Phase.LOADED:
                self._end(request, None)
            else:
                self._fail(request, FailCode.PREFILL_ABORTED, message.reason, tell=False)
        self._pay_acks()

    def _pay_acks(self) -> None:
        reading = {(self._alive[key.transfer_id][1], key.request_id) for key in self._reads}
        for request in [request for request in self._owed if request not in reading]:
            self._ack(self._owed.pop(request))
