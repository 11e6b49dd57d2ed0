"""The bench of the connector conformance suite for connectors over NIXL: the peer is another process with a raw agent.

It has to be: between two agents of one process UCX copies memory without asking anybody, so that nothing is a fence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from nixl_peer import NixlPeer

from pdkv.errors import TransportError
from pdkv.kvcache import GrowableKVCache
from pdkv.lifecycle import RegistersKVCache
from pdkv.testing import ConnectorBench
from pdkv.testing.child import ChildEnded, ChildError


class NixlBench(ConnectorBench):
    """Around a connector of this process.

    Args:
        agent: the connector's NIXL agent now; None while it has none.
        registered: `(address, nbytes)` of what NIXL has registered of the cache.
        peer: moves blocks; it stays alive.
        reads: whether the peer reads from the owner; else it writes.
        undo: called when a check is over, after the connector has unregistered.
    """

    def __init__(
        self,
        cache: GrowableKVCache,
        connector: RegistersKVCache,
        agent: Callable[[], Any],
        registered: Callable[[], Sequence[tuple[int, int]]],
        peer: NixlPeer,
        *,
        reads: bool = True,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        self.cache, self.connector = cache, connector
        self.owner_is_source = reads
        self._agent, self._registered, self._peer, self._undo = agent, registered, peer, undo
        self._known: str | None = None

    def registered(self) -> Sequence[tuple[int, int]]:
        return self._registered()

    def meet(self) -> None:
        metadata = self._agent().get_agent_metadata().hex()
        self._known = self._ask("meet", metadata=metadata, forget=self._known)

    def move(self, block: int, value: int) -> bytes:
        if self.owner_is_source and self.cache.num_committed_blocks:
            for view in self.cache.committed_views().values():
                view[block].view(torch.uint8).fill_(value)
        pages = [
            [view.data_ptr() + block * view.stride(0) * view.element_size(), view[0].numel() * view.element_size()]
            for view in self.cache.views().values()
        ]
        try:
            got = self._ask("move", peer=self._known, pages=pages, value=None if self.owner_is_source else value)
        except (ChildError, ChildEnded, TimeoutError) as error:
            raise TransportError(f"the peer could not move the block: {error}") from error
        if self.owner_is_source:
            return bytes.fromhex(got)
        return b"".join(
            view[block].contiguous().view(-1).numpy().tobytes() for view in self.cache.committed_views().values()
        )

    def _ask(self, do: str, **arguments: Any) -> Any:
        """Ask the peer, and let this side's agent make progress meanwhile, without which none connects to it."""
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(self._peer.ask(do, **arguments))
            except Exception as error:
                answers.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():
            if (agent := self._agent()) is not None:
                agent.get_new_notifs()
            time.sleep(0.001)
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def owner_is_alive(self) -> bool:
        return True  # this very process

    def close(self) -> None:
        self.connector.unregister_kv_cache()
        self._undo()
