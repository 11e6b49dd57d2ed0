"""What the nixl transport knows of a peer, and has under way with it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdkv.errors import ConnectorError, TransportError
from pdkv.transfer.base import PostedTransfer
from pdkv.transfer.checks import Connection
from pdkv.transfer.transport import TransferState
from pdkv_connectors.nixl.agent import translated

if TYPE_CHECKING:
    from pdkv_connectors.nixl.notes import NoteAsked
    from pdkv_connectors.nixl.transport import NixlTransport

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Link:
    """A peer's agent.

    Attributes:
        verifies: whether the peer keeps sums, and wants what is written there to be compared.
        suspect: a transfer with it failed, and UCX takes no other one until the peer has been added anew.
        renewed: it has been added anew and nothing has succeeded since; it is not done a second time.
    """

    agent: str
    metadata: bytes
    verifies: bool = False
    suspect: bool = False
    renewed: bool = False


class NixlAsked:
    """A question; NIXL brings the answer when its agent is called."""

    def __init__(self, transport: NixlTransport, link: Link, asked: NoteAsked) -> None:
        self._mine, self._link, self._asked = transport, link, asked

    def answer(self) -> bytes | None:
        self._mine.receive()
        try:
            return self._asked.answer()
        except TransportError:
            self._link.suspect = True
            raise


class NixlTransfer(PostedTransfer):
    """One NIXL request."""

    def __init__(self, transport: NixlTransport, connection: Connection[Link], nbytes: int, handle: Any) -> None:
        super().__init__(transport, connection, nbytes)
        self._mine = transport
        self._handle: Any = handle

    def start(self) -> None:
        """Post it.

        Raises:
            TransportError: NIXL did not take it, and nothing is in flight.
        """
        try:
            with translated("post a transfer"):
                state = self._mine.agent.transfer(self._handle)
            if state == "ERR":
                raise TransportError("NIXL could not post a transfer; the peer may have gone.")
        except ConnectorError:
            self.connection.link.suspect = True
            self.drop()
            raise

    def drop(self) -> None:
        """Let go of the request; where it still runs, only the end of the agent ends it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                handle.release()
            except Exception as error:
                logger.debug("NIXL kept a request that still runs: %s", error)

    def _look(self) -> TransferState:
        try:
            with translated("complete a transfer"):
                state = self._mine.agent.check_xfer_state(self._handle)
        except TransportError as error:
            state, self.reason = "ERR", str(error)
        if state == "PROC":
            return TransferState.RUNNING
        link = self.connection.link
        self.drop()
        if state == "DONE":
            link.renewed = False
            return TransferState.DONE
        link.suspect = True
        self.reason = (
            self.reason or "NIXL reports an error; the peer has gone, or its memory is not registered any more."
        )
        return TransferState.FAILED
