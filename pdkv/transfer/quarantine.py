"""Blocks that a transfer may still touch although nobody wants it any more (I11).

Cancelling a transfer does not stop it: with the peer stopped, a READ that was released, whose remote agent was removed
and whose memory was deregistered landed all the same when the peer went on. So the blocks of a transfer that was given
up stay out of the pool until it is known to have ended. Where that does not happen, the transport's agent is destroyed
and built again, which is known to stop it, and only then are they freed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pdkv.transfer.actions import FreeBlocks
from pdkv.transfer.clock import Clock
from pdkv.transfer.counters import Counters
from pdkv.transfer.messages import TransferKey


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineSettings:
    """`rebuild_after_s`: age at which the agent is rebuilt; `max_blocks`: size at which it is rebuilt at once."""

    rebuild_after_s: float = 30.0
    max_blocks: int = 4096


@dataclass(slots=True)
class _Entry:
    request_id: str
    block_ids: tuple[int, ...]
    running: set[TransferKey]
    since: float


class Quarantine:
    """Holds blocks until every transfer that may touch them has ended, or the agent is gone."""

    def __init__(self, clock: Clock, counters: Counters, settings: QuarantineSettings | None = None) -> None:
        self._clock = clock
        self._counters = counters
        self._settings = settings or QuarantineSettings()
        self._entries: list[_Entry] = []
        self._rebuild_asked = False

    @property
    def num_blocks(self) -> int:
        """Blocks held now: a metric."""
        return sum(len(entry.block_ids) for entry in self._entries)

    @property
    def oldest_age_s(self) -> float:
        """Seconds that the oldest entry has been held, 0.0 where there is none: a metric."""
        return max((self._clock.monotonic() - entry.since for entry in self._entries), default=0.0)

    def request_ids(self) -> tuple[str, ...]:
        """Whose blocks are held, in order of their coming; one may be there more than once."""
        return tuple(entry.request_id for entry in self._entries)

    def hold(self, request_id: str, block_ids: tuple[int, ...], running: Collection[TransferKey]) -> None:
        """Keep the blocks until each of the `running` transfers has ended."""
        self._entries.append(_Entry(request_id, block_ids, set(running), self._clock.monotonic()))
        self._counters.count("quarantined_blocks", len(block_ids))

    def holds(self, key: TransferKey) -> bool:
        """Whether blocks wait for this transfer."""
        return any(key in entry.running for entry in self._entries)

    def ended(self, key: TransferKey) -> tuple[FreeBlocks, ...]:
        """This transfer touches nothing any more; what may be freed now. Idempotent."""
        for entry in self._entries:
            entry.running.discard(key)
        return self._free(lambda entry: not entry.running)

    def wants_rebuild(self) -> str | None:
        """Why the agent must be rebuilt, said once until it was; None where it need not be."""
        if self._rebuild_asked or not self._entries:
            return None
        if self.oldest_age_s >= self._settings.rebuild_after_s:
            reason = f"a transfer has not ended {self.oldest_age_s:.0f} s after it was given up"
        elif self.num_blocks > self._settings.max_blocks:
            reason = f"{self.num_blocks} blocks are in quarantine, more than {self._settings.max_blocks}"
        else:
            return None
        self._rebuild_asked = True
        self._counters.count("agent_rebuilds")
        return f"{reason}; no transfer of the old agent can touch memory once it is destroyed."

    def agent_rebuilt(self) -> tuple[FreeBlocks, ...]:
        """The agent that held all transfers so far is gone: everything may be freed."""
        self._rebuild_asked = False
        return self._free(lambda _: True)

    def next_deadline(self) -> float | None:
        """When an entry gets too old."""
        if self._rebuild_asked or not self._entries:
            return None
        if self.num_blocks > self._settings.max_blocks:
            return self._clock.monotonic()
        return min(entry.since for entry in self._entries) + self._settings.rebuild_after_s

    def _free(self, may_go: Callable[[_Entry], bool]) -> tuple[FreeBlocks, ...]:
        freed = [entry for entry in self._entries if may_go(entry)]
        self._entries = [entry for entry in self._entries if not may_go(entry)]
        return tuple(FreeBlocks(entry.request_id, entry.block_ids) for entry in freed)
