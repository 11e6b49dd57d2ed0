"""P's books of the references that it issued: which are genuine, in time, and used by whom."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from pdkv.errors import StateError
from pdkv.transfer.blocks import BlockRun
from pdkv.transfer.clock import Clock
from pdkv.transfer.counters import Counters
from pdkv.transfer.messages import Claim, EngineRef, FailCode, Keyed
from pdkv.transfer.reference import Reference

#: Entries that one new reference looks at, to find some that can be forgotten.
_LOOKED_AT = 16

Refusal = tuple[FailCode, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """`valid_s`: seconds in which a reference must first be used; `max_issued`: requests that P remembers."""

    valid_s: float = 600.0
    max_issued: int = 65_536


@dataclass(slots=True)
class _Issued:
    """The references to one request: an early one, the final one, or both.

    Attributes:
        macs: by digest.
        users: the D engine and its use, by rank of D. Each rank takes the KV once.
    """

    expires_at: float
    ranks: int
    macs: dict[bytes, bytes] = field(default_factory=dict)
    users: dict[int, tuple[str, int]] = field(default_factory=dict)
    is_over: bool = False

    @property
    def is_in_use(self) -> bool:
        return bool(self.users) and not self.is_over


class IssuedReferences:
    """Makes references and judges the claims that come of them. The key is new in each process and never leaves it.

    A claim is accepted where its MAC is right, the reference is to the request that the message names, and either
    nobody has used it for that rank and it has not expired, or the same use of it goes on. What P has forgotten counts
    as expired. Time is P's own clock in both directions; no clock reading is sent.
    """

    def __init__(self, clock: Clock, counters: Counters, settings: ReferenceSettings | None = None) -> None:
        self._clock = clock
        self._counters = counters
        self._settings = settings or ReferenceSettings()
        self._key = secrets.token_bytes(32)
        self._issued: OrderedDict[str, _Issued] = OrderedDict()
        self._serial = 0

    def __len__(self) -> int:
        return len(self._issued)

    def issue(
        self,
        engine: EngineRef,
        request_id: str,
        num_tokens: int,
        blocks: tuple[BlockRun, ...] | None = None,
        *,
        ranks: int = 1,
    ) -> Reference:
        """A new reference. One without `blocks` is early: the final one to the same request may follow it.

        Raises:
            StateError: an early one, and a reference to this request was issued already.
        """
        if blocks is None and request_id in self._issued:
            raise StateError(f"a reference to request {request_id!r} was issued already; pass that one on.")
        self._serial += 1
        unsealed = Reference(
            engine=engine,
            request_id=request_id,
            num_tokens=num_tokens,
            blocks=blocks or (),
            serial=self._serial,
            valid_s=self._settings.valid_s,
            mac=bytes(32),
        )
        reference = msgspec.structs.replace(unsealed, mac=self._mac(unsealed.digest()))
        self._remember(reference, ranks)
        return reference

    def adopt(self, reference: Reference, *, ranks: int = 1) -> None:
        """Judge the claims of a reference that another process of this engine has made, with a key of its own."""
        self._remember(reference, ranks)

    def check(self, message: Keyed) -> Refusal | None:
        """Why the sender may not have, or end, what it asks for; None where it may. The first use is noted.

        The refusals: FORGED, EXPIRED, REPLAYED.
        """
        claim, key = message.claim, message.key
        issued = self._issued.get(key.request_id)
        macs = {} if issued is None else issued.macs
        if claim is None or not hmac.compare_digest(claim.mac, macs.get(claim.digest, self._mac(claim.digest))):
            return FailCode.FORGED, "this engine did not issue the reference, or it was altered on its way"
        if issued is None:
            return FailCode.EXPIRED, "the reference is older than this engine remembers"
        if claim.digest not in issued.macs:
            return FailCode.FORGED, "the reference is not to this request, or this engine has forgotten that it is"
        return self._check_use(issued, key.rank, (message.sender.engine_id, claim.use), claim)

    def over(self, request_id: str) -> None:
        """Nothing can be had of this request any more; the entry may go as soon as it has expired."""
        if (issued := self._issued.get(request_id)) is not None:
            issued.is_over = True

    def _check_use(self, issued: _Issued, rank: int, user: tuple[str, int], claim: Claim) -> Refusal | None:
        first = issued.users.get(rank)
        if first == user:
            return None
        if first is not None or len(issued.users) >= issued.ranks:
            return FailCode.REPLAYED, "the reference was used before; prefill the request again"
        if issued.expires_at <= self._clock.monotonic():
            return FailCode.EXPIRED, f"nobody used the reference within {self._settings.valid_s:.0f} s"
        issued.users[rank] = user
        return None

    def _remember(self, reference: Reference, ranks: int) -> None:
        self._forget()
        expires_at = self._clock.monotonic() + reference.valid_s
        issued = self._issued.setdefault(reference.request_id, _Issued(expires_at, ranks))
        issued.macs[reference.digest()] = reference.mac
        issued.expires_at, issued.ranks = expires_at, ranks
        self._issued.move_to_end(reference.request_id)

    def _forget(self) -> None:
        """Drop the oldest entries that are expired and not in use; where there is no room, an old one all the same."""
        now = self._clock.monotonic()
        for request_id, issued in list(islice(self._issued.items(), _LOOKED_AT)):
            if issued.expires_at > now:
                break
            if issued.is_in_use:
                self._issued.move_to_end(request_id)
            else:
                del self._issued[request_id]
        while len(self._issued) >= self._settings.max_issued:
            oldest = list(islice(self._issued.items(), _LOOKED_AT))
            del self._issued[next((name for name, issued in oldest if not issued.is_in_use), oldest[0][0])]
            self._counters.count("references_forgotten")

    def _mac(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key, digest_size=32, person=b"pdkv-mac").digest()
