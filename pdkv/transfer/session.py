"""A session: one engine's end of P/D transfers, ready to use by any engine.

::

    session = Session(LocalHost(make_transport, cache, engine_id, compatibility), carrier)
    P:  reference = session.offer(request_id, [BlockRun(0, block_ids)], num_tokens)    # its prefill is complete
    D:  session.arrived(request_id, reference, num_tokens)           # as soon as the request is here, queued or not
        session.allocated(request_id, [BlockRun(first, block_ids)])  # the blocks that its prefix cache lacks
    both: for event in session.poll(): ...                           # once a step

The engine calls from its own thread, and gets what has happened from :meth:`Session.poll`. While it takes no steps, a
thread does the same (:meth:`Session.start`), which sleeps until a message comes or something is due. All is under one
lock. No call waits but for the end of the own transport, `close_s` at most, in :meth:`Session.close` and where an agent
must be rebuilt. A peer's transport is waited for by turns, `connect_s` at most, and all else goes on meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pdkv import lifecycle
from pdkv.errors import PdkvError, StateError
from pdkv.transfer import actions as do
from pdkv.transfer.admission import Room
from pdkv.transfer.blocks import BlockRun, block_ids
from pdkv.transfer.consumer import Consumer
from pdkv.transfer.hosting import LocalHost
from pdkv.transfer.messages import EngineRef, FailCode
from pdkv.transfer.producer import Producer
from pdkv.transfer.reference import Reference
from pdkv.transfer.session_base import Event, Role, SessionSettings
from pdkv.transfer.session_sleep import SleepingSession
from pdkv.transfer.session_thread import SessionThread, Turn

logger = logging.getLogger(__name__)

__all__ = ["Event", "Role", "Session", "SessionSettings"]


class Session(SleepingSession):
    """See the module's docstring. Request ids are the engine's own; no two requests have the same.

    Args:
        host: the transport over the engine's cache; registered.
        carrier: of messages; the engine id that it introduces itself by is the registration's.
        role: "prefill", "decode" or "both".

    Events of :meth:`poll`:

    - `Loaded`: the KV of a request is there; its blocks are the engine's.
    - `Failed`: the request must end with an error; `Recompute`: compute its prompt, in other blocks. Which of the two
      is ``settings.decode.on_failure``. Blocks that it had follow in a `FreeBlocks`, maybe later.
    - `FreeBlocks`: the pool may have these blocks back, on P and on D.
    """

    _thread: SessionThread | None = None
    _on_event: Callable[[], None] | None = None
    _closed = False

    @property
    def engine(self) -> EngineRef:
        """This engine, in the generation that peers know."""
        return self._endpoints[0].me

    # P.

    def offer(self, request_id: str, runs: Sequence[BlockRun], num_tokens: int, *, ranks: int = 1) -> Reference:
        """The prompt's KV is complete; keep its blocks for D until a `FreeBlocks`. See :meth:`Producer.prefilled`.

        Raises:
            StateError: asleep or going to; or a second prefill under the same request id.
        """
        with self._lock:
            self._require_accepting(f"prefill {request_id!r}")
            reference = self._prefill().prefilled(request_id, runs, num_tokens, ranks=ranks)
            self._offer_to_peers(block_ids(runs))
            self._after_call()
            return reference

    def expect(self, request_id: str, num_tokens: int, *, ranks: int = 1) -> Reference:
        """Push: an early reference to a prefill that still runs. See :meth:`Producer.expect`."""
        with self._lock:
            self._require_accepting(f"prefill {request_id!r}")
            return self._prefill().expect(request_id, num_tokens, ranks=ranks)

    def prefill_aborted(self, request_id: str, reason: str) -> None:
        """The request has ended on P without KV to give, or P wants its blocks back."""
        with self._lock:
            self._prefill().prefill_aborted(request_id, reason)
            self._after_call()

    # D.

    def arrived(self, request_id: str, reference: Reference, num_tokens: int) -> None:
        """A request whose KV is on P has reached D; its lease is renewed from now on. `num_tokens`: of its prompt.

        Where too many wait already it fails with NO_ROOM, whatever `on_failure` says, and P is told.

        Raises:
            StateError: asleep or going to; or the request is here already.
        """
        with self._lock:
            self._require_accepting(f"request {request_id!r}")
            decode = self._decode()
            decode.arrived(request_id, reference, num_tokens)
            if request_id in decode and not self._admission.try_enter(request_id):
                room = self._admission.room()
                decode.gone(request_id, "too many requests wait for KV")
                reason = f"{room.waiting} requests wait for KV already; try again in {room.retry_after_s} s"
                self._events.append(do.Failed(request_id, FailCode.NO_ROOM, reason))
            self._after_call()

    def allocated(self, request_id: str, runs: Sequence[BlockRun]) -> None:
        """D has blocks for what its prefix cache lacks; none where that has all. See :meth:`Consumer.allocated`."""
        with self._lock:
            self._decode().allocated(request_id, runs)
            self._after_call()

    def gone(self, request_id: str, reason: str) -> None:
        """The request is over on D before its KV was used; blocks that it still has here follow in a `FreeBlocks`."""
        with self._lock:
            self._admission.leave(request_id)
            self._decode().gone(request_id, reason)
            self._after_call()

    def finished(self, request_id: str) -> None:
        """D has finished with the request. Idempotent."""
        self.gone(request_id, "finished")

    def preempted(self, request_id: str) -> bool:
        """D took the blocks away. True: call `allocated` again; False: compute it here (:meth:`Consumer.preempted`)."""
        with self._lock:
            again = self._decode().preempted(request_id)
            self._after_call()
            return again

    def room(self) -> Room:
        """How many more requests may wait for KV here, for who routes them."""
        with self._lock:
            return self._admission.room()

    # Both.

    def poll(self) -> tuple[Event, ...]:
        """What has happened since the last call, in order, after what progress can be made without waiting.

        Where a thread makes progress too, what it has found already is returned at once.

        Raises:
            ConnectorError: the thread has ended by an error.
        """
        with self._lock:
            if self._thread is not None:
                self._thread.require_running()
            if not self._closed and (self._thread is None or not self._events):
                self._work()
            events, self._events = tuple(self._events), []
            return events

    def start(self, on_event: Callable[[], None] | None = None) -> None:
        """Keep going by a thread from now on, also while nobody polls.

        Args:
            on_event: called by a thread of pdkv, outside of the lock, when there is something to poll. It must not
                wait or raise.
        """
        with self._lock:
            if self._closed or self._thread is not None:
                raise StateError("the session is closed, or has its thread already; start() is called once.")
            self._on_event = on_event
            thread = self._thread = SessionThread(self._turn, self.carrier.fileno())
            self.carrier.call_on_arrival(lambda: thread.instead(self._turn_unless_busy))

    def sleep(self, mode: lifecycle.SleepMode = "refuse", *, timeout_s: float = 30.0) -> lifecycle.SleepReport:
        """:func:`pdkv.lifecycle.sleep` of the cache in this process; raises as that does."""
        return lifecycle.sleep(self._local_host().cache, self, mode=mode, timeout_s=timeout_s)

    def wake(self) -> lifecycle.WakeReport:
        """:func:`pdkv.lifecycle.wake` of the cache in this process; raises as that does."""
        return lifecycle.wake(self._local_host().cache, self)

    def metrics(self) -> dict[str, Any]:
        """Counters since the start, and gauges as of now; plain values."""
        with self._lock:
            room = self._admission.room()
            return {
                "engine_id": self.engine.engine_id,
                "generation": self.engine.generation,
                "asleep": self.host.registration is None,
                "transfers": len(self._running),
                "held_requests": sum(len(endpoint.holders()) for endpoint in self._endpoints),
                "quarantined_blocks": sum(endpoint.quarantine.num_blocks for endpoint in self._endpoints),
                "quarantine_age_s": max(endpoint.quarantine.oldest_age_s for endpoint in self._endpoints),
                "waiting": room.waiting,
                "max_waiting": room.capacity,
                "retry_after_s": room.retry_after_s,
                "transport": self.host.describe_state(),
                "counters": self.counters.as_dict(),
            }

    def close(self) -> None:
        """End the thread, destroy the transport's agent, close the carrier. Idempotent. Peers notice by silence.

        Raises:
            ConnectorError: the thread or the agent has not ended; keep the cache, and close() again.
        """
        if self._thread is not None:
            self._thread.close(self.settings.close_s)
        with self._lock:
            self._closed = True
            try:
                self.host.close(timeout_s=self.settings.close_s)
                self._forget_transfers()
            finally:
                self.carrier.close()

    # Parts.

    def _turn(self) -> Turn:
        with self._lock:
            turn = self._found(worked=self._work())
        self._tell()
        return turn

    def _turn_unless_busy(self) -> Turn | None:
        """For a thread that is not to wait until another one has done its work."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._closed:
                return None
            turn = self._found(worked=self._work())
        finally:
            self._lock.release()
        self._tell()
        return turn

    def _tell(self) -> None:
        if self._events and self._on_event is not None:
            self._on_event()

    def _found(self, *, worked: bool) -> Turn:
        due_at = self._next_deadline()
        held = self._producer is not None and bool(self._producer.holders())
        return Turn(
            worked=worked,
            polls=bool(self._running) or bool(self._meetings) or self._rebuilding,
            serves=held and self.host.needs_progress,
            due_in_s=None if due_at is None else due_at - self._clock.monotonic(),
        )

    def _after_call(self) -> None:
        """Do what the call has brought about, in the calling thread; the other one may have to wake up earlier."""
        self._act()
        if self._thread is not None:
            self._thread.wake(self._found(worked=True))

    def _offer_to_peers(self, blocks: Sequence[int]) -> None:
        if not self._is_pull or not blocks:
            return
        try:
            self.host.offer(blocks)
        except PdkvError as error:  # peers can read them all the same, only later
            self.counters.count("offers_refused")
            logger.warning("The transport could not prepare %d blocks: %s", len(blocks), error)

    def _prefill(self) -> Producer:
        if self._producer is None:
            raise StateError('this session is one of decode; make it with role "prefill" or "both".')
        return self._producer

    def _decode(self) -> Consumer:
        if self._consumer is None:
            raise StateError('this session is one of prefill; make it with role "decode" or "both".')
        return self._consumer

    def _local_host(self) -> LocalHost:
        if not isinstance(self.host, LocalHost):
            raise StateError("the cache of this session is in other processes; put it to sleep there.")
        return self.host
