"""The ranks of peers that one rank of `PdkvConnector` knows, and those of them that its transport is connecting to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pdkv.errors import PdkvError
from pdkv.transfer.connecting import Connecting
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.transport import Transport
from pdkv_connectors.vllm.session_orders import Rank

CONNECT_TIMEOUT_S = 5.0


class WorkerPeers:
    """By their engine ids. Nothing here waits for a peer, since the engine's step would."""

    def __init__(self) -> None:
        self._known: dict[str, Rank] = {}  # without metadata: connected
        self._connecting: dict[str, Connecting] = {}

    def learn(self, ranks: Iterable[Rank]) -> None:
        """What the scheduler's half has heard of peers, in the place of what it had said before."""
        for rank in ranks:
            self.forget(rank.engine.engine_id)
            self._known[rank.engine.engine_id] = rank

    def forget(self, engine_id: str) -> None:
        """Idempotent; one that is being connected to is given up."""
        self._known.pop(engine_id, None)
        if (connecting := self._connecting.pop(engine_id, None)) is not None:
            connecting.abandon()

    def clear(self) -> None:
        """Forget all."""
        for engine_id in list(self._known):
            self.forget(engine_id)

    def meet(self, transport: Transport, peers: Iterable[EngineRef]) -> bool:
        """Begin to connect to those of `peers` that are not connected; whether there was such a one.

        A peer that nobody has described is left to the transport, which refuses transfers with it.

        Raises:
            PdkvError: as :meth:`Transport.begin_connect`.
        """
        has_begun = False
        for peer in peers:
            known = self._known.get(peer.engine_id)
            if known is None or not known.metadata or peer.engine_id in self._connecting:
                continue
            begun = transport.begin_connect(
                known.engine, known.metadata, timeout_s=CONNECT_TIMEOUT_S, heads=known.heads
            )
            if begun is None:
                self._is_connected(peer.engine_id)
            else:
                self._connecting[peer.engine_id] = begun
                has_begun = True
        return has_begun

    def poll(self) -> dict[str, PdkvError]:
        """Go on connecting; why not, for each peer for which it has come to that."""
        errors = {}
        for engine_id, connecting in list(self._connecting.items()):
            try:
                if not connecting.poll():
                    continue
                self._is_connected(engine_id)
            except PdkvError as error:
                errors[engine_id] = error
            del self._connecting[engine_id]
        return errors

    def awaits(self, peers: Iterable[EngineRef]) -> bool:
        """Whether one of them is still being connected to."""
        return any(peer.engine_id in self._connecting for peer in peers)

    def _is_connected(self, engine_id: str) -> None:
        """What it takes to connect is not needed any more."""
        self._known[engine_id] = replace(self._known[engine_id], metadata=b"")
