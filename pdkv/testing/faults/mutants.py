"""Deliberately broken variants of the rules. The simulation must find something wrong with each of them.

Each is what a real system did, or nearly did; the docstring says what goes wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdkv.testing.faults.simulation import Parts
from pdkv.transfer.actions import PostWrite
from pdkv.transfer.blocks import BlockPair, BlockRun, block_ids
from pdkv.transfer.consumer import Consumer
from pdkv.transfer.consumer_state import Phase, Request
from pdkv.transfer.issued import IssuedReferences, Refusal
from pdkv.transfer.leases import Lease, LeaseTable
from pdkv.transfer.messages import Done, Fail, FailCode, Keyed, LeaseState
from pdkv.transfer.peers import UsedTransfers
from pdkv.transfer.producer import Producer
from pdkv.transfer.reference import Reference


class NoQuarantineOnDecode(Consumer):
    """Blocks of a transfer that was given up go back to the pool at once; it writes into another request's KV."""

    def _leave_blocks(self, request: Request, quiet: bool) -> None:
        self._free(request.request_id, block_ids(request.runs))


class NoQuarantineOnPrefill(Producer):
    """Blocks go back when the lease ends although a WRITE still reads them; decode gets another request's KV."""

    def _free_or_hold(self, lease: Lease) -> None:
        self._free(lease.request_id, block_ids(lease.blocks))


class HeadOnlyTable(LeaseTable):
    """Looks at the lease granted first and stops there if it lives."""

    def expired(self) -> tuple[Lease, ...]:
        first = next(iter(self._leases.values()), None)
        return super().expired() if first is not None and first.expires_at <= self._clock.monotonic() else ()


class ReaperLooksAtTheHead(Producer):
    """A renewed lease at the head of the table keeps expired ones behind it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._leases = HeadOnlyTable(self._clock, self._settings.lease)


class SleepyTable(LeaseTable):
    """Expects someone to come by."""

    def next_deadline(self) -> float | None:
        return None


class IdleEngineDoesNotReap(Producer):
    """Leases are looked at when there is other work, so that an idle engine keeps blocks for ever."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._leases = SleepyTable(self._clock, self._settings.lease)


class CompletionOfAnyAttempt(Consumer):
    """A completion is matched by request, not by transfer: a late one of an earlier attempt completes this one."""

    def _from_prefill(self, message: Done | Fail) -> None:
        for request in self._requests.values():
            if isinstance(message, Done) and request.key.request_id == message.key.request_id:
                super()._from_prefill(Done(sender=message.sender, receiver=message.receiver, key=request.key))
                return
        super()._from_prefill(message)


class CompletionTwice(Producer):
    """A completion that comes twice frees the blocks twice."""

    def _rank_ended(self, request_id: str, rank: int) -> None:
        lease = self._leases.get(request_id)
        if lease is not None:
            self._remembered = getattr(self, "_remembered", {}) | {request_id: lease}
        elif self._leases.state(request_id) is LeaseState.ENDED and request_id in getattr(self, "_remembered", {}):
            self._free_or_hold(self._remembered[request_id])
        super()._rank_ended(request_id, rank)


class LeaseAssumedAlive(Consumer):
    """What a READ brought is believed without knowing whether prefill still had the blocks: a wrong 200.

    Its patience with a silent prefill has no end either, which would save it most of the time.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._settings = replace(self._settings, silence_s=1e6, wait_s=1000.0)

    def _kept_until(self, request: Request, at: float) -> bool:
        return True


class EarlyReadsBelieved(Consumer):
    """What an early READ brought is believed without prefill's word, which may be that it had let go of the blocks."""

    def _confirm(self, request: Request) -> None:
        if request.read_failure is None and not self._is_answered(request):
            self._arrived_whole(request)
        else:
            super()._confirm(request)


class DoneWhenPosted(Producer):
    """Prefill says DONE when it has posted the WRITE, so that the notification overtakes the data."""

    def _start_write(self, register: object) -> None:
        super()._start_write(register)  # type: ignore[arg-type]
        for action in self._actions:
            if isinstance(action, PostWrite) and not self._outbox.pending(action.key):
                self._send(Done(sender=self.me, receiver=action.peer, key=action.key))


class ForgetfulIds(UsedTransfers):
    """Every registration is news."""

    def is_over(self, engine_id: str, transfer_id: int) -> bool:
        return False


class RegistrationsReplayed(Producer):
    """A registration that comes again late is written again, into blocks that decode has given to someone else."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._used = ForgetfulIds()


class CancelAcknowledgedAtOnce(Producer):
    """Says that a transfer is over while its WRITE is in flight; decode gives the blocks away."""

    def _transfer_over(self, message: Keyed) -> None:
        if message.key in self._writes:
            self._ack(message)
        super()._transfer_over(message)


class WatchdogOnlyLogs(Consumer):
    """As stock push: after the deadline the books are closed and nobody is told."""

    def _give_up(self, request_id: str, code: FailCode, reason: str) -> None:
        self.counters.count("logged")


class AbortForgetsHeldLeases(Consumer):
    """Prefill's ABORT is acknowledged for a loaded request, which reads again later all the same."""

    def _end(self, request: Request, message: Keyed | None, *, quiet: bool = False) -> None:
        if request.phase is not Phase.LOADED or message is not None:
            super()._end(request, message, quiet=quiet)


class RebuildAssumedDone(Consumer):
    """Blocks in quarantine are freed when the agent is asked to be rebuilt, not when it is gone."""

    def tick(self) -> None:
        super().tick()
        if self.quarantine._rebuild_asked:
            self._actions.extend(self.quarantine.agent_rebuilt())
            self.quarantine._rebuild_asked = False


class BelievedReferences(IssuedReferences):
    """Whoever asks is right."""

    def check(self, message: Keyed) -> Refusal | None:
        return None


class ReferencesNotSealed(Producer):
    """Block ids that whoever routes has changed are read: another request's KV."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._references = BelievedReferences(self._clock, self.counters)


class ReferencesReadTwice(Consumer):
    """Decode takes a reference a second time; only prefill, which knows of the first use, can refuse it."""

    def _first_use(self, reference: Reference) -> bool:
        return True


def pair_from_the_end(source: Sequence[BlockRun], destination: Sequence[BlockRun]) -> tuple[BlockPair, ...]:
    """The last blocks of both lists belong together. Until one list has a block more."""
    pairs = []
    for group, (ours, theirs) in enumerate(zip(source, destination, strict=True)):
        count = min(len(ours.block_ids), len(theirs.block_ids))
        for index in range(1, count + 1):
            pairs.append(BlockPair(group, ours.block_ids[-index], theirs.block_ids[-index]))
    return tuple(pairs)


_BROKEN_PREFILL: tuple[type[Producer], ...] = (
    NoQuarantineOnPrefill,
    ReaperLooksAtTheHead,
    IdleEngineDoesNotReap,
    CompletionTwice,
    DoneWhenPosted,
    RegistrationsReplayed,
    CancelAcknowledgedAtOnce,
    ReferencesNotSealed,
)
_BROKEN_DECODE: tuple[type[Consumer], ...] = (
    NoQuarantineOnDecode,
    CompletionOfAnyAttempt,
    LeaseAssumedAlive,
    EarlyReadsBelieved,
    WatchdogOnlyLogs,
    AbortForgetsHeldLeases,
    RebuildAssumedDone,
)

MUTANTS: dict[str, Parts] = {
    **{kind.__name__: Parts(producer=kind) for kind in _BROKEN_PREFILL},
    **{kind.__name__: Parts(consumer=kind) for kind in _BROKEN_DECODE},
    "ReferencesUsedTwice": Parts(producer=ReferencesNotSealed, consumer=ReferencesReadTwice),
    "PairingFromTheEnd": Parts(pair=pair_from_the_end),
}
