"""Meeting a peer in steps, none of which waits: whoever drives a transport has others to see to meanwhile."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TypeVar

from pdkv.errors import PdkvError, TransportError

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Yields where it would have to wait, and ends with what came of it. Closing it lets go of what it holds."""

FIRST_PAUSE_S, PAUSE_GROWTH, LONGEST_PAUSE_S = 20e-6, 1.25, 1e-3


class Connecting(ABC):
    """A peer that is being connected to; see :meth:`pdkv.transfer.transport.Transport.begin_connect`."""

    @abstractmethod
    def poll(self) -> bool:
        """Whether the peer is connected, after making what progress can be made without waiting for it.

        Raises as :meth:`pdkv.transfer.transport.Transport.connect` does; then it is over and nothing is held, and it
        raises the same from then on.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Nobody wants the peer any more: let go of what is held. Idempotent; nothing where it is connected."""


class SteppedConnecting(Connecting):
    """One whose steps are a generator's."""

    def __init__(self, steps: Steps[None]) -> None:
        self._steps = steps
        self._is_connected = self._is_abandoned = False
        self._error: PdkvError | None = None

    def poll(self) -> bool:
        if self._error is not None:  # a generator that has raised looks like one that has ended
            raise self._error
        if self._is_abandoned:
            raise TransportError("connecting to the peer was given up; handshake with it again.")
        if not self._is_connected:
            try:
                next(self._steps)
            except StopIteration:
                self._is_connected = True
            except PdkvError as error:
                self._error = error
                raise
        return self._is_connected

    def abandon(self) -> None:
        if not self._is_connected:
            self._is_abandoned = True
            self._steps.close()


class Attempts:
    """Those of a transport, the last one for each engine."""

    def __init__(self) -> None:
        self._by_engine: dict[str, SteppedConnecting] = {}

    def begin(self, engine_id: str, steps: Steps[None]) -> SteppedConnecting:
        """In the place of an earlier one."""
        self.abandon(engine_id)
        attempt = self._by_engine[engine_id] = SteppedConnecting(steps)
        return attempt

    def abandon(self, engine_id: str) -> None:
        """Nothing where there is none, or where it is over."""
        if (attempt := self._by_engine.pop(engine_id, None)) is not None:
            attempt.abandon()

    def abandon_all(self) -> None:
        """Idempotent, too."""
        for engine_id in list(self._by_engine):
            self.abandon(engine_id)


def connected(begun: Connecting | None) -> Steps[None]:
    """The steps until a peer is connected, as a part of others; one that is not waited for to the end is given up."""
    if begun is not None:
        try:
            while not begun.poll():
                yield
        finally:
            begun.abandon()


def run_to_end(steps: Steps[T]) -> T:
    """Take all steps, pausing between them, which have a deadline of their own."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        time.sleep(pause_s)
        pause_s = min(PAUSE_GROWTH * pause_s, LONGEST_PAUSE_S)
