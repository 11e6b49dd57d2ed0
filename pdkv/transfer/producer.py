"""P: keeps the blocks of requests whose prefill has ended until D has them, does not want them, or is silent.

A request on P::

    prefill runs ──prefilled──▶ LEASED ──DONE, FAIL or ABORT from every rank of D──▶ over
         │                        │  ╰──no renewal: the lease runs out───────────────▶ over
         ╰──prefill_aborted──▶ over  ╰──ABORT to D, acknowledged───────────────────▶ over

When a request is over its blocks are freed at once, or, where a WRITE still reads them, when that has ended (I11).
In push a REGISTER starts the WRITE; it may come before `prefilled` and then waits, bounded in number and time.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdkv.errors import CapacityError, ProtocolError, StateError
from pdkv.transfer.actions import PostWrite
from pdkv.transfer.blocks import BlockRun, block_ids, pair_by_index, require_committed, units_of
from pdkv.transfer.clock import earliest
from pdkv.transfer.messages import (
    Abort,
    Ack,
    AnyMessage,
    Cancel,
    Descriptor,
    Done,
    EngineRef,
    Fail,
    FailCode,
    Handshake,
    Keyed,
    LeaseState,
    Refuse,
    Register,
    Renew,
    Renewed,
    TransferKey,
    Welcome,
    type_of,
)
from pdkv.transfer.producer_books import Early, ProducerBooks
from pdkv.transfer.reference import Reference


class Producer(ProducerBooks):
    """One rank of P. See :class:`pdkv.transfer.endpoint.Endpoint` for how it is driven."""

    # From the engine.

    def expect(self, request_id: str, num_tokens: int, *, ranks: int = 1) -> Reference:
        """A reference to a request whose prefill has yet to end, so that D can register early (push).

        Args:
            num_tokens, ranks: as in :meth:`prefilled`.

        Raises:
            StateError: asleep, or a reference to this request was issued already.
        """
        if self.asleep:
            raise StateError("the engine is asleep; wake it before it expects a request.")
        return self._references.issue(self.me, request_id, num_tokens, ranks=ranks)

    def prefilled(
        self,
        request_id: str,
        blocks: Sequence[BlockRun],
        num_tokens: int,
        *,
        ranks: int = 1,
        reference: Reference | None = None,
    ) -> Reference:
        """The prompt's KV is complete: keep its blocks for D under a lease.

        The blocks come back in a FreeBlocks, at once where D has given up already, where there is nothing to keep, or
        where no more leases can be held (counted, ``lease_table_full``; D then finds no lease).

        Args:
            blocks: this rank's blocks, one run per KV-cache group.
            num_tokens: tokens of the prompt.
            ranks: how many ranks of D take blocks from this rank.
            reference: one to just this that another process of the engine has issued already; else one is made.

        Raises:
            StateError: asleep, or a second prefill under the same request id.
        """
        if self.asleep:
            raise StateError("the engine is asleep, its blocks have no memory; wake it before a request is prefilled.")
        unwanted = self._unwanted.pop(request_id, set())
        try:
            self._leases.grant(request_id, blocks, num_tokens, ranks=ranks)
            is_kept = True
        except CapacityError:
            is_kept = False
        if reference is None:
            reference = self._references.issue(self.me, request_id, num_tokens, tuple(blocks), ranks=ranks)
        else:
            self._references.adopt(reference, ranks=ranks)
        if not is_kept:
            self.counters.count("lease_table_full")
            self._free(request_id, block_ids(blocks))
            self._fail_early(request_id, FailCode.NO_ROOM, "prefill holds as many leases as it may")
            return reference
        self.counters.count("leases")
        if not block_ids(blocks):
            self._end_lease(request_id, "leases_without_blocks")
        for rank in unwanted:
            self._rank_ended(request_id, rank)
        for key, early in [item for item in self._early.items() if item[0].request_id == request_id]:
            del self._early[key]
            self._start_write(early.register)
        return reference

    def prefill_aborted(self, request_id: str, reason: str) -> None:
        """The request ended on P without KV to give, or P wants the blocks of its lease back.

        A D that has asked for the blocks is told and the blocks are freed when it has stopped, or when the lease, which
        is not renewed any more, runs out. A D that has not asked yet will be told that there is no lease.
        """
        self._fail_early(request_id, FailCode.PREFILL_ABORTED, reason)
        if self._leases.state(request_id) is LeaseState.UNKNOWN:
            self._leases.note_ended(request_id)
            self._references.over(request_id)
            return
        takers = self._takers.get(request_id, {})
        if not takers:
            self._end_lease(request_id, "leases_aborted")
            return
        self._leases.revoke(request_id)
        for key, engine in takers.items():
            self._send(Abort(sender=self.me, receiver=engine, key=key, reason=reason[:512]))

    def sleep(self) -> None:
        """Refuse everything from now on, and tell who knows this engine; then the host may release its memory.

        Raises:
            StateError: asleep already; or blocks are held for D, or a WRITE has not ended: the message names them.
        """
        if self.asleep:
            raise StateError("the engine is asleep already.")
        held = self.holders()
        if held or self.quarantine.num_blocks:
            raise StateError(
                f"{len(held)} requests hold leases ({', '.join(held[:8])}) and {self.quarantine.num_blocks} blocks are "
                "in quarantine; wait until they have ended, or abort them, before sleeping."
            )
        self.asleep = True
        for peer in self._peers.all():
            self._send(self._refusal(peer.ref, self.me, FailCode.ASLEEP, "the engine has gone to sleep"))

    def wake(self, generation: int, descriptor: Descriptor) -> None:
        """Memory is registered again, as `generation`, which must be higher than before."""
        if generation <= self.me.generation:
            raise StateError(f"generation {generation} does not follow {self.me.generation}; it has to rise.")
        self.me, self.descriptor = EngineRef(self.me.engine_id, generation), descriptor
        self._peers.clear()
        self.asleep = False

    # From the transport.

    def received(self, message: AnyMessage) -> None:
        """A message arrived; it may be late, repeated, or meant for an engine that is gone."""
        if isinstance(message, Handshake):
            self._handshake(message)
            return
        if not isinstance(message, Keyed):
            self.counters.count("unexpected_messages")
            return
        if message.receiver.engine_id != self.me.engine_id:
            self._refuse_peer(message, FailCode.WRONG_ENGINE, "another engine has taken this address")
            return
        self._used.raise_floor(message.sender.engine_id, message.floor)
        match message:
            case Renew():
                self._renew(message)
            case Register():
                self._register(message)
            case Cancel():
                self._transfer_over(message)
            case Done() | Fail() | Abort():
                self.counters.count(f"received_{type_of(message).lower()}")
                self._transfer_over(message)
                if (refusal := self._references.check(message)) is None:
                    self._rank_ended(message.key.request_id, message.key.rank)
                else:
                    self.counters.count(f"refused_{refusal[0]}")
            case Ack():
                self._acknowledged(message)
            case _:
                self.counters.count("unexpected_messages")

    def write_ended(
        self, key: TransferKey, ok: bool, *, code: FailCode = FailCode.TRANSFER_FAILED, reason: str = ""
    ) -> None:
        """A WRITE has ended: every byte is in D's memory (`ok`), or it failed and nothing of it is in flight.

        Args:
            code, reason: of what was not `ok`; POST_FAILED where the transport did not take it.
        """
        register = self._writes.pop(key, None)
        if register is None:
            self.counters.count("late_write_ends")
            return
        self._used.mark(register.sender.engine_id, key.transfer_id)
        if owed := self._owed.pop(key, None):
            for message in owed:
                self._ack(message)
        elif ok:
            self._send(Done(sender=self.me, receiver=register.sender, key=key))
        else:
            self._fail(register, code, reason or "the WRITE failed")
        self._actions.extend(self.quarantine.ended(key))

    def peer_unreached(self, peer: EngineRef) -> None:
        """The transport could not reach this peer. D, which has met P, does not come again by itself: the next WRITE to
        it adds it once more.
        """
        self._peers.note_unreached(peer)

    def agent_rebuilt(self, generation: int, descriptor: Descriptor) -> None:
        """The old agent is destroyed and a new one registered, as `generation`: no old WRITE goes on."""
        self.me, self.descriptor = EngineRef(self.me.engine_id, generation), descriptor
        self._peers.clear()
        for key in list(self._writes):
            self.write_ended(key, False)
        self._actions.extend(self.quarantine.agent_rebuilt())

    def tick(self) -> None:
        for lease in self._leases.expired():
            self._end_lease(lease.request_id, "leases_expired")
        now = self._clock.monotonic()
        for key, early in list(self._early.items()):
            if early.until <= now:
                del self._early[key]
                self.counters.count("orphaned_registrations")
                self._fail(early.register, FailCode.TIMED_OUT, "no prefill ended under this request id")
        super().tick()

    def next_deadline(self) -> float | None:
        first_early = min((early.until for early in self._early.values()), default=None)
        return earliest(super().next_deadline(), self._leases.next_deadline(), first_early)

    # Messages.

    def _handshake(self, message: Handshake) -> None:
        why_not = self._why_incompatible(message.descriptor.compatibility)
        if message.receiver.engine_id != self.me.engine_id:
            self._refuse_peer(message, FailCode.WRONG_ENGINE, "another engine has taken this address")
            return
        if self.asleep:
            self._refuse_peer(message, FailCode.ASLEEP, "the engine is asleep")
            return
        if why_not is not None:
            self._refuse_peer(message, FailCode.INCOMPATIBLE, why_not)
            return
        self._learn(message.sender, message.descriptor)
        self._send(Welcome(sender=self.me, receiver=message.sender, descriptor=self.descriptor))

    def _refuse_peer(self, message: Handshake | Keyed, code: FailCode, reason: str) -> None:
        self.counters.count(f"refused_{code}")
        if not isinstance(message, Ack):
            self._send(self._refusal(message.sender, message.receiver, code, reason))

    def _refusal(self, peer: EngineRef, meant: EngineRef, code: FailCode, reason: str) -> Refuse:
        return Refuse(sender=self.me, receiver=peer, meant=meant, code=code, reason=reason[:512])

    def _renew(self, message: Renew) -> None:
        if self._is_refused(message):
            return
        request_id = message.key.request_id
        state = self._leases.state(request_id)
        remaining_s = self._leases.renew(request_id) if state is LeaseState.LIVE else 0.0
        if state is LeaseState.LIVE:
            takers = self._takers[request_id]
            for old in [key for key in takers if key.rank == message.key.rank]:
                del takers[old]
            takers[message.key] = message.sender
        self._send(
            Renewed(
                sender=self.me,
                receiver=message.sender,
                key=message.key,
                sequence=message.sequence,
                state=state,
                remaining_s=min(remaining_s, 86_400.0),
            )
        )

    def _register(self, message: Register) -> None:
        key = message.key
        if key in self._writes or key in self._early or self._used.is_over(message.sender.engine_id, key.transfer_id):
            self.counters.count("repeated_registrations")
            self._ack(message)
            return
        if self._is_refused(message):
            return
        self._ack(message)
        state = self._leases.state(key.request_id)
        if state is LeaseState.LIVE:
            self._start_write(message)
        elif state is LeaseState.ENDED:
            self._fail(message, FailCode.LEASE_LOST, "the lease of this request has ended")
        elif len(self._early) >= self._settings.max_early:
            self._fail(message, FailCode.NO_ROOM, f"{len(self._early)} registrations wait for their prefill already")
        else:
            until = self._clock.monotonic() + min(message.remaining_s, self._settings.early_s)
            self._early[key] = Early(message, until)

    def _start_write(self, register: Register) -> None:
        """Check everything before a descriptor is posted; what does not fit fails this request only."""
        key, lease = register.key, self._leases.get(register.key.request_id)
        if lease is None:
            self._fail(register, FailCode.LEASE_LOST, "the lease of this request has ended")
            return
        peer = self._peers.get(register.sender)
        if register.receiver != self.me or peer is None:
            self._fail(register, FailCode.STALE_GENERATION, "the memory of one side has been replaced; handshake again")
            return
        try:
            require_committed(register.runs, peer.descriptor.num_blocks)
            if register.num_tokens != lease.num_tokens:
                raise ProtocolError(f"the prompt has {register.num_tokens} tokens on D and {lease.num_tokens} on P.")
            sizes = self.descriptor.compatibility.block_size, peer.descriptor.compatibility.block_size
            pairs = pair_by_index(*units_of(lease.blocks, register.runs, sizes, lease.num_tokens))
        except ProtocolError as error:
            self._fail(register, FailCode.BAD_BLOCKS, str(error))
            return
        if (again := self._peers.add_again(register.sender)) is not None:
            self._actions.append(again)
        self._writes[key] = register
        self._actions.append(PostWrite(key, register.sender, pairs))

    def _acknowledged(self, message: Ack) -> None:
        if not self._outbox.acknowledged(message.key, message.of, message.sender.engine_id):
            self.counters.count("late_acks")
        taker = self._takers.get(message.key.request_id, {}).get(message.key)
        if message.of == "ABORT" and taker is not None and taker.engine_id == message.sender.engine_id:
            self._rank_ended(message.key.request_id, message.key.rank)
