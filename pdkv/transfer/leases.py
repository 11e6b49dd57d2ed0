"""Leases: how long P keeps the blocks of a request whose prefill has ended, and how D keeps them alive.

P grants 30 s. D renews every 5 s from the moment the request reaches it, the time in its own queue included, and each
renewal moves the end to 20 s from now if that is later (vLLM's numbers: lease, lease / 6, lease * 2 / 3). The two never
compare clocks. P answers with the seconds that remain, and D counts them from when it *asked*: what D believes always
ends before what P holds. Data that D has read by then is what P had promised to keep; later than that it may not be.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdkv.errors import CapacityError, ConfigError, StateError
from pdkv.transfer.blocks import BlockRun
from pdkv.transfer.clock import Clock
from pdkv.transfer.messages import LeaseState, TransferKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Times in seconds; counts of entries.

    Attributes:
        duration_s: length of a lease from the end of prefill.
        extension_s: what a renewal leaves at least.
        renew_every_s: how often D renews.
        retry_every_s: how often D asks until P's first answer.
        margin_s: D trusts a lease this much shorter than promised: two clocks may differ in speed.
        max_leases: leases that P can hold.
        max_ended: ended leases that P remembers, to tell "over" from "not yet".

    Raises:
        ConfigError: a renewal could be lost without a second one before the lease ends.
    """

    duration_s: float = 30.0
    extension_s: float = 20.0
    renew_every_s: float = 5.0
    retry_every_s: float = 1.0
    margin_s: float = 0.5
    max_leases: int = 65_536
    max_ended: int = 65_536

    def __post_init__(self) -> None:
        shortest = min(self.duration_s, self.extension_s)
        if not 0 < self.retry_every_s <= self.renew_every_s <= shortest / 2:
            raise ConfigError(
                f"renewals every {self.renew_every_s} s do not fit twice into {shortest} s of lease; renew more often."
            )


@dataclass(slots=True)
class Lease:
    """Blocks that P keeps for D.

    Attributes:
        blocks: one run per KV-cache group.
        num_tokens: tokens of the prompt, compared with D's.
        ranks: how many ranks of D take from this P rank; the lease ends with the last of them.
        revoked: it runs out, but is not renewed.
    """

    request_id: str
    blocks: tuple[BlockRun, ...]
    num_tokens: int
    ranks: int
    expires_at: float
    ended_ranks: set[int] = field(default_factory=set)
    revoked: bool = False


class LeaseTable:
    """P's leases by request id. Says who has expired; its owner frees the blocks."""

    def __init__(self, clock: Clock, settings: LeaseSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or LeaseSettings()
        self._leases: dict[str, Lease] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, request_id: str, blocks: Sequence[BlockRun], num_tokens: int, *, ranks: int = 1) -> Lease:
        """A new lease.

        Raises:
            StateError: the request has, or had, one.
            CapacityError: the table is full.
        """
        if self.state(request_id) is not LeaseState.UNKNOWN:
            raise StateError(f"request {request_id!r} has or had a lease; every prefill needs a request id of its own.")
        if len(self._leases) >= self._settings.max_leases:
            raise CapacityError(f"{len(self._leases)} leases are held, the most allowed; free this request's blocks.")
        expires_at = self._clock.monotonic() + self._settings.duration_s
        lease = Lease(request_id, tuple(blocks), num_tokens, ranks, expires_at)
        self._leases[request_id] = lease
        return lease

    def get(self, request_id: str) -> Lease | None:
        """The lease, as long as it has not expired."""
        lease = self._leases.get(request_id)
        return lease if lease is not None and lease.expires_at > self._clock.monotonic() else None

    def state(self, request_id: str) -> LeaseState:
        """Whether P holds the request's blocks. An expired lease has ended, reaped or not."""
        if request_id in self._leases:
            return LeaseState.LIVE if self.get(request_id) is not None else LeaseState.ENDED
        return LeaseState.ENDED if request_id in self._ended else LeaseState.UNKNOWN

    def renew(self, request_id: str) -> float:
        """Extend the lease; the seconds that remain of it now, 0.0 where there is none. Never shortens it."""
        lease = self.get(request_id)
        if lease is None:
            return 0.0
        now = self._clock.monotonic()
        if not lease.revoked:
            lease.expires_at = max(lease.expires_at, now + self._settings.extension_s)
        return lease.expires_at - now

    def rank_ended(self, request_id: str, rank: int) -> bool:
        """One rank of D wants no more of it; True if that was the last one. Idempotent."""
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        lease.ended_ranks.add(rank)
        return len(lease.ended_ranks) >= lease.ranks

    def revoke(self, request_id: str) -> None:
        """Let it run out: renewals are answered with what remains and add nothing."""
        if (lease := self._leases.get(request_id)) is not None:
            lease.revoked = True

    def end(self, request_id: str) -> Lease | None:
        """Remove a lease and remember that it was; None where there is none."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self.note_ended(request_id)
        return lease

    def note_ended(self, request_id: str) -> None:
        """Remember that there will be no lease for this request."""
        self._ended[request_id] = None
        while len(self._ended) > self._settings.max_ended:
            self._ended.popitem(last=False)

    def expired(self) -> tuple[Lease, ...]:
        """All leases that have run out. All are looked at: renewals do not keep the table in order of expiry."""
        now = self._clock.monotonic()
        return tuple(lease for lease in self._leases.values() if lease.expires_at <= now)

    def __contains__(self, request_id: str) -> bool:
        """Whether its blocks are held, expired or not."""
        return request_id in self._leases

    def request_ids(self) -> tuple[str, ...]:
        """Whose blocks are held, expired ones included."""
        return tuple(self._leases)

    def next_deadline(self) -> float | None:
        """When the first lease runs out: an idle engine must wake up for it."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)


@dataclass(slots=True)
class _Renewal:
    due_at: float
    asked_at: dict[int, float] = field(default_factory=dict)  # sequence number -> when
    guaranteed_until: float | None = None


class Renewer:
    """D's side: when to renew, and until when P is known to keep the blocks."""

    def __init__(self, clock: Clock, settings: LeaseSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or LeaseSettings()
        self._renewals: dict[TransferKey, _Renewal] = {}
        self._sequence = 0

    def start(self, key: TransferKey) -> None:
        """Renew at once, and from then on."""
        self._renewals.setdefault(key, _Renewal(due_at=self._clock.monotonic()))

    def stop(self, key: TransferKey) -> None:
        """Idempotent."""
        self._renewals.pop(key, None)

    def take_due(self) -> tuple[tuple[TransferKey, int], ...]:
        """`(key, sequence)` of each renewal to send now; each is taken to have been sent."""
        now = self._clock.monotonic()
        due = []
        for key, renewal in self._renewals.items():
            if renewal.due_at > now:
                continue
            self._sequence += 1
            renewal.asked_at[self._sequence] = now
            for old in [sequence for sequence, at in renewal.asked_at.items() if now - at > self._settings.duration_s]:
                del renewal.asked_at[old]
            answered = renewal.guaranteed_until is not None
            renewal.due_at = now + (self._settings.renew_every_s if answered else self._settings.retry_every_s)
            due.append((key, self._sequence))
        return tuple(due)

    def answered(self, key: TransferKey, sequence: int, remaining_s: float | None) -> float | None:
        """P's answer to a renewal: `remaining_s` of the lease, None where there is none.

        Returns when it was asked, or None where it answers nothing that is being asked (late, repeated, invented).
        """
        renewal = self._renewals.get(key)
        if renewal is None or (asked_at := renewal.asked_at.pop(sequence, None)) is None:
            return None
        if remaining_s is None:
            return asked_at
        until = asked_at + remaining_s - self._settings.margin_s
        if renewal.guaranteed_until is None:
            renewal.due_at = max(renewal.due_at, asked_at + self._settings.renew_every_s)
            renewal.guaranteed_until = until
        renewal.guaranteed_until = max(renewal.guaranteed_until, until)
        return asked_at

    def rename(self, key: TransferKey, new: TransferKey) -> None:
        """Another attempt of the same request: the lease is the same."""
        self._renewals[new] = self._renewals.pop(key)

    def ask_now(self, key: TransferKey) -> None:
        """Do not wait for the interval: the answer is needed."""
        if (renewal := self._renewals.get(key)) is not None:
            renewal.due_at = self._clock.monotonic()

    def guaranteed_until(self, key: TransferKey) -> float | None:
        """Until when, on this clock, P keeps the blocks for certain; None before its first answer."""
        renewal = self._renewals.get(key)
        return None if renewal is None else renewal.guaranteed_until

    def next_deadline(self) -> float | None:
        """When the next renewal is due."""
        return min((renewal.due_at for renewal in self._renewals.values()), default=None)
