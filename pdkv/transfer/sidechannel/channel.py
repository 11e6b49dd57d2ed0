"""The side channel as an engine uses it."""

from __future__ import annotations

import concurrent.futures
import logging
import os
from collections.abc import Callable

from pdkv.errors import StateError, TransportError
from pdkv.transfer.clock import Clock, SystemClock
from pdkv.transfer.counters import Counters
from pdkv.transfer.messages import AnyMessage, Message, encode
from pdkv.transfer.sidechannel.addresses import Address
from pdkv.transfer.sidechannel.loop import Loop
from pdkv.transfer.sidechannel.queues import Inbox, Outgoing
from pdkv.transfer.sidechannel.settings import SideChannelSettings

logger = logging.getLogger(__name__)

MAX_TAKEN = 256


class SideChannel:
    """Carries messages between engines over ZeroMQ; a :class:`pdkv.transfer.carrier.MessageCarrier`.

    Threads may share it: a thread of its own has the sockets, and who sends borrows them from it. It is up when the
    constructor returns; peers are connected to in the background, for as long as it takes.

    Args:
        engine_id: of this engine (one per rank, new at each start).
        counters: counted in by whichever thread sends or receives; none of an endpoint's.

    Raises:
        ConfigError: the settings are unsafe or contradictory, or the address cannot be listened on.
        TransportError: it did not start in time.
    """

    def __init__(
        self,
        engine_id: str,
        settings: SideChannelSettings | None = None,
        *,
        clock: Clock | None = None,
        counters: Counters | None = None,
    ) -> None:
        settings = settings or SideChannelSettings()
        settings.require_consistent()
        limits = settings.limits
        self.engine_id = engine_id
        self.counters = counters or Counters()
        self._inbox = Inbox(limits.inbox_messages, limits.inbox_nbytes)
        self._outgoing = Outgoing(limits.outgoing_messages, limits.outgoing_nbytes)
        self._loop = Loop(engine_id, settings, self._inbox, self._outgoing, clock or SystemClock(), self.counters)
        self._is_secured = settings.keys is not None
        self._closed = False
        self._pid = os.getpid()
        self._loop.start()
        try:
            #: Where it listens, with the real port; None where it only connects.
            self.address: Address | None = self._loop.ready.result(limits.start_s)
        except concurrent.futures.TimeoutError:
            self.close()
            raise TransportError(f"the side channel did not start within {limits.start_s} s; try again.") from None
        except BaseException:
            self.close()
            raise
        logger.info("Side channel of %s: listening on %s, %s.", engine_id, self.address, self._how())

    def send(self, message: Message) -> bool:
        self._require_open()
        taken = self._loop.send(message.receiver.engine_id, encode(message))
        if not taken:
            self.counters.count("outgoing_overflows")
        return taken

    def receive(self) -> tuple[AnyMessage, ...]:
        self._require_open()
        return self._inbox.take(MAX_TAKEN)

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to receive; False where there was nothing in time.

        Raises:
            StateError: closed, also while it waits.
        """
        self._require_open()
        found = self._inbox.signal.wait(timeout_s)
        self._require_open()
        return found

    def wait_for_peer(self, engine_id: str, timeout_s: float) -> bool:
        """Wait until an engine can be sent to; False where it could not be in time. Nobody has to."""
        self._require_open()
        return self._loop.wait_for(engine_id, timeout_s)

    def fileno(self) -> int:
        return self._inbox.signal.fileno()

    def call_on_arrival(self, handler: Callable[[], bool]) -> None:
        self._require_open()
        self._loop.on_arrival = handler

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Send what waits, as far as that goes at once, and let go of everything. Idempotent; from any thread.

        Where the thread does not end in time that is logged, and it keeps what it uses until close() is called again.
        In a forked child nothing is done: all of it is the parent's.
        """
        self._closed = True
        if os.getpid() != self._pid:
            return
        self._loop.stop()
        self._loop.join(timeout_s)
        if self._loop.is_alive():
            logger.error("The side channel of %s did not end within %s s.", self.engine_id, timeout_s)
            return
        self._inbox.signal.close()
        self._outgoing.signal.close()

    def describe_state(self) -> dict[str, object]:
        """For operators: address, whether keys are used, peers, and what was counted."""
        return {
            "engine_id": self.engine_id,
            "address": str(self.address) if self.address else None,
            "secured": self._is_secured,
            **self._loop.state(),
            "counts": self.counters.as_dict(),
        }

    def __enter__(self) -> SideChannel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _how(self) -> str:
        return "with keys" if self._is_secured else "without keys"

    def _require_open(self) -> None:
        if os.getpid() != self._pid:  # ZeroMQ would wait there for ever, and the descriptors are its parent's
            raise StateError(f"this side channel belongs to process {self._pid}; make one after the fork.")
        if self._closed:
            raise StateError(f"the side channel of {self.engine_id} is closed; make a new one.")
        if self._loop.failure is not None:
            raise TransportError(f"the side channel of {self.engine_id} has ended: {self._loop.failure}.")
