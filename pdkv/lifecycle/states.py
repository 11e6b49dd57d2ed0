"""The states of a cache together with its connectors, and which transition each of them allows.

========  ==========================  ==================  =====================================================
state     event                       next                condition
========  ==========================  ==================  =====================================================
running   sleep                       draining            always
draining  nothing holds blocks        asleep              connectors unregistered, memory given back
draining  refused, or out of time     running             the error lists who holds blocks
draining  unregistering failed        asleep              memory is kept; waking registers it again
asleep    wake                        running             memory committed and zeroed, registered, published
asleep    wake, memory is missing     asleep              the error says how much; it can be tried again
running   lend                        lent                only while weights are loaded
lent      loading ended or failed     running             where memory was lent: zeroed, registered, published
lent      taking back failed          asleep              the error says how much is missing; wake it later
========  ==========================  ==================  =====================================================

Everything else is refused with an error that names the state: sleep while draining, asleep or lent; wake while running,
draining or lent; lend, extend and grow while anything but running. Peers that crash are no event here: what they hold
is among the connector's holders until it has ended.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pdkv.errors import StateError

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache


class State(StrEnum):
    """Where a cache and its connectors are; see the module's table."""

    RUNNING = "running"
    DRAINING = "draining"
    ASLEEP = "asleep"
    LENT = "lent"


_ALLOWED = {
    State.RUNNING: {State.DRAINING, State.LENT},
    State.DRAINING: {State.RUNNING, State.ASLEEP},
    State.ASLEEP: {State.RUNNING},
    State.LENT: {State.RUNNING, State.ASLEEP},
}

_WHAT_TO_DO = {
    State.RUNNING: "it has its memory already",
    State.DRAINING: "wait until it is asleep or runs again",
    State.ASLEEP: "wake it first",
    State.LENT: "wait until the weights are loaded",
}


class StateMachine:
    """The state of one cache. Only :mod:`pdkv.lifecycle` changes it."""

    def __init__(self) -> None:
        self._state = State.RUNNING
        #: Physical memory in bytes that waking will take; what the cache had when it was released.
        self.bytes_asleep = 0

    @property
    def state(self) -> State:
        """The state now."""
        return self._state

    def require(self, wanted: State, event: str) -> None:
        """Raise StateError, which names the state, unless it is `wanted`."""
        if self._state is not wanted:
            raise StateError(
                f"{event}: the KV cache is {self._state}, but must be {wanted} for it; {_WHAT_TO_DO[self._state]}."
            )

    def require_running(self, event: str) -> None:
        """Raise StateError unless the cache is running."""
        self.require(State.RUNNING, event)

    def move(self, to: State) -> None:
        """Go on to a state that the table allows."""
        if to not in _ALLOWED[self._state]:
            raise StateError(f"a KV cache that is {self._state} cannot become {to}; this is an error in pdkv.")
        self._state = to


_machines: WeakKeyDictionary[GrowableKVCache, StateMachine] = WeakKeyDictionary()


def machine_of(cache: GrowableKVCache) -> StateMachine:
    """The one state machine of a cache. It begins as running, or as asleep where the cache was released by hand."""
    machine = _machines.get(cache)
    if machine is None:
        machine = _machines[cache] = StateMachine()
    if cache.is_released and machine.state is State.RUNNING:
        machine.move(State.DRAINING)
        machine.move(State.ASLEEP)
    return machine


def state(cache: GrowableKVCache) -> State:
    """Whether the cache is running, draining, asleep or lent."""
    return machine_of(cache).state
