"""How an engine of the process harness sleeps, wakes and lends; at one of the steps a signal strikes its peer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdkv import lifecycle
from pdkv.errors import LeasesHeldError
from pdkv.testing.stopping import stop

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv.transfer.session import Session

#: More largest layers than any host has room for, so that an update must borrow the cache's memory.
_SHORT_OF_MEMORY = 1e12


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal for a peer, sent as the lifecycle reaches a step of :class:`EngineConnector`, just before it is done."""

    step: str
    pid: int
    signal: int


class EngineConnector:
    """A session as :mod:`pdkv.lifecycle` sees it (`SleepsWithPeers`), together with the requests of its engine.

    Args:
        unfinished: the engine's requests that have their KV and still decode.
        drop: ends all of those.
    """

    registers_memory = True

    def __init__(self, session: Session, unfinished: Callable[[], Sequence[str]], drop: Callable[[], None]) -> None:
        self.strike: Strike | None = None
        self._session, self._unfinished, self._drop = session, unfinished, drop

    def _reaches(self, step: str) -> None:
        if self.strike is not None and self.strike.step == step:
            if self.strike.signal == signal.SIGSTOP:
                stop(self.strike.pid)
            else:
                os.kill(self.strike.pid, self.strike.signal)
            self.strike = None

    def refuse_transfers(self) -> None:
        self._session.refuse_transfers()
        self._reaches("refuse_transfers")

    def holders(self) -> tuple[str, ...]:
        return (*self._session.holders(), *self._unfinished())

    def abort_transfers(self, reason: str) -> None:
        self._drop()
        self._session.abort_transfers(reason)

    def withdraw(self) -> None:
        self._reaches("withdraw")
        self._session.withdraw()

    def unregister_kv_cache(self) -> None:
        self._reaches("unregister")
        self._session.unregister_kv_cache()

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        self._reaches("register")
        self._session.register_kv_cache(cache)

    def publish(self, generation: int) -> None:
        self._session.publish(generation)

    def resume_transfers(self) -> None:
        self._reaches("resume_transfers")
        self._session.resume_transfers()


class SteppingClock:
    """The clock of a sleep that waits: an engine goes on with its steps meanwhile."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        self._step()
        time.sleep(min(seconds, 0.002))


def put_to_sleep(
    cache: GrowableKVCache, connector: EngineConnector, step: Callable[[], None], mode: lifecycle.SleepMode,
    timeout_s: float,
) -> dict[str, Any]:  # fmt: skip
    """:func:`pdkv.lifecycle.sleep`; bytes before, given back as the driver counts them, and held afterwards.

    Where it is refused: by whom blocks are held.
    """
    before = cache.physical_bytes
    try:
        report = lifecycle.sleep(cache, connector, mode=mode, timeout_s=timeout_s, clock=SteppingClock(step))
    except LeasesHeldError as error:
        return {"refused": error.holders}
    return {"before": before, "given_back": report.given_back, "held": cache.physical_bytes}


def lend(cache: GrowableKVCache, connector: EngineConnector) -> dict[str, Any]:
    """A weight update that has no room but the cache's; bytes before, given back, and held inside, and afterwards."""
    import torch

    before = cache.physical_bytes
    with lifecycle.kv_cache_lent_for_weight_update(
        cache, torch.nn.Linear(8, 8), reclaimable=True, connector=connector, factor=_SHORT_OF_MEMORY
    ) as report:
        held = cache.physical_bytes
    return {"before": before, "given_back": report.given_back, "held": held, "after": cache.physical_bytes}
