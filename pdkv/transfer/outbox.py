"""Messages that are repeated until the peer acknowledges them, or until it is given up.

The side channel may lose, delay, repeat and reorder. So what must be known on the other side is sent again at growing
intervals, and what arrives is handled so that a repetition changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.transfer.actions import Send
from pdkv.transfer.clock import Clock
from pdkv.transfer.counters import Counters
from pdkv.transfer.messages import Keyed, TransferKey, type_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """Seconds: first repetition, longest interval (it doubles each time), and when to stop; entries at most."""

    retry_after_s: float = 1.0
    longest_interval_s: float = 8.0
    give_up_after_s: float = 60.0
    max_entries: int = 65_536


@dataclass(slots=True)
class _Entry:
    send: Send
    due_at: float
    interval_s: float
    until: float


class Outbox:
    """One entry per transfer and type of message."""

    def __init__(self, clock: Clock, counters: Counters, settings: OutboxSettings | None = None) -> None:
        self._clock = clock
        self._counters = counters
        self._settings = settings or OutboxSettings()
        self._entries: dict[TransferKey, dict[str, _Entry]] = {}
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def put(self, send: Send, message: Keyed) -> None:
        """The message was sent now; repeat it until it is acknowledged. A second one of its type is the same one."""
        entries = self._entries.setdefault(message.key, {})
        if type_of(message) in entries:
            return
        if self._num_entries >= self._settings.max_entries:
            self._counters.count("outbox_overflows")
            self.forget(next(iter(self._entries)))
            entries = self._entries.setdefault(message.key, {})
        now, retry_after_s = self._clock.monotonic(), self._settings.retry_after_s
        until = now + self._settings.give_up_after_s
        entries[type_of(message)] = _Entry(send, now + retry_after_s, retry_after_s, until)
        self._num_entries += 1

    def acknowledged(self, key: TransferKey, of: str, by: str | None = None) -> bool:
        """Stop repeating; False where nothing of the kind was being repeated, or not to the engine `by`."""
        entries = self._entries.get(key, {})
        if of not in entries or (by is not None and entries[of].send.engine_id != by):
            return False
        del entries[of]
        self._num_entries -= 1
        if not entries:
            del self._entries[key]
        return True

    def forget(self, key: TransferKey) -> None:
        """Stop repeating everything about a transfer."""
        self._num_entries -= len(self._entries.pop(key, {}))

    def forget_engine(self, engine_id: str) -> tuple[TransferKey, ...]:
        """Stop repeating everything to an engine that is gone; the transfers that it was about."""
        keys = tuple(
            key for key, of in self._entries.items() if any(e.send.engine_id == engine_id for e in of.values())
        )
        for key in keys:
            self.forget(key)
        return keys

    def pending(self, key: TransferKey) -> bool:
        """Whether the peer has yet to acknowledge something about this transfer."""
        return key in self._entries

    def take_due(self) -> tuple[tuple[Send, ...], tuple[TransferKey, ...]]:
        """What to send again now, and the transfers of which something was given up."""
        now = self._clock.monotonic()
        again: list[Send] = []
        given_up: list[TransferKey] = []
        for key, entries in list(self._entries.items()):
            for of, entry in list(entries.items()):
                if entry.due_at > now:
                    continue
                if now >= entry.until:
                    self.acknowledged(key, of)
                    self._counters.count("unacknowledged")
                    given_up.append(key)
                    continue
                entry.interval_s = min(2 * entry.interval_s, self._settings.longest_interval_s)
                entry.due_at = min(now + entry.interval_s, entry.until)
                self._counters.count("resent")
                again.append(entry.send)
        return tuple(again), tuple(given_up)

    def next_deadline(self) -> float | None:
        """When something is due again."""
        return min((entry.due_at for entries in self._entries.values() for entry in entries.values()), default=None)
