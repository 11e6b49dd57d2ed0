"""How a session lets go of its memory and comes back: what :mod:`pdkv.lifecycle` asks of a connector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdkv.errors import ConnectorError, StateError
from pdkv.transfer.hosting import LocalHost
from pdkv.transfer.messages import FailCode
from pdkv.transfer.session_base import SessionBase

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache


class SleepingSession(SessionBase):
    """A :class:`pdkv.lifecycle.SleepsWithPeers`. Transfers that have begun go on to their end while it refuses others.

    Where the host is no :class:`LocalHost`, registering and unregistering are the host's owner's to do.
    """

    registers_memory = True
    _refusing = False

    def refuse_transfers(self) -> None:
        with self._lock:
            self._refusing = True

    def resume_transfers(self) -> None:
        with self._lock:
            self._refusing = False

    def holders(self) -> tuple[str, ...]:
        """Requests with a lease, a transfer or blocks in quarantine, after what progress can be made at once."""
        with self._lock:
            self._work()
            found: set[str] = set()
            for endpoint in (self._producer, self._consumer):
                if endpoint is not None:
                    found.update(endpoint.holders(), endpoint.quarantine.request_ids())
            return tuple(sorted(found))

    def abort_transfers(self, reason: str) -> None:
        with self._lock:
            if self._producer is not None:
                for request_id in self._producer.holders():
                    self._producer.prefill_aborted(request_id, reason)
            if self._consumer is not None:
                self._consumer.abort_all(FailCode.ASLEEP, reason)
            self._act()

    def withdraw(self) -> None:
        """Peers that have met this engine as P are told once; one that does not hear it is refused when it asks.

        Raises:
            ConnectorError: a request still holds blocks.
        """
        with self._lock:
            if self._producer is not None and not self._producer.asleep:
                try:
                    self._producer.sleep()
                except StateError as error:
                    raise ConnectorError(str(error)) from error
            self._act()

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        """Raises as :class:`LocalHost` does."""
        with self._lock:
            if isinstance(self.host, LocalHost) and self.host.registration is None:
                self.host.register()

    def unregister_kv_cache(self) -> None:
        """Destroy the agent: from here on nobody can reach the memory. Idempotent."""
        with self._lock:
            if isinstance(self.host, LocalHost):
                self.host.close(timeout_s=self.settings.close_s)
            self._forget_transfers()

    def publish(self, generation: int) -> None:
        """Answer handshakes with the present registration.

        Raises:
            StateError: nothing is registered.
        """
        with self._lock:
            found = self.host.registration
            if found is None:
                raise StateError("no KV cache is registered, so there is nothing to publish; register it first.")
            self._rebuilding = False
            if self._producer is not None and self._producer.asleep:
                self._producer.wake(found.engine.generation, found.descriptor)
            self._tell_registration(found)
            self._act()

    def _require_accepting(self, what: str) -> None:
        if self._refusing:
            raise StateError(f"{what} was refused: the engine goes to sleep, or is asleep; wake it first.")
