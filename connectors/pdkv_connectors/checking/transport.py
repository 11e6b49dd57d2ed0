"""What transports share that verify where they are told to, and ask over a channel of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pdkv.errors import TransportError
from pdkv.transfer.base import PostedTransfer, TransportBase
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection
from pdkv_connectors.checking.transfer import CheckedTransfer
from pdkv_connectors.ipc.offers import require_agreed

if TYPE_CHECKING:
    from pdkv.transfer.clock import Clock
    from pdkv_connectors.checking.keeper import SumKeeper
    from pdkv_connectors.checking.transfer import Asked

L = TypeVar("L")  # what a transport keeps of a peer


class CheckingTransport(TransportBase[L]):
    """Its subclass says how bytes and questions travel, in :meth:`_move` and :meth:`_ask`, and has :meth:`_do_post` end
    by :meth:`_post_checked`. While a cache is registered and `verifies` is true, it has `_keeper`, and its channel
    brings peers' questions to :meth:`SumKeeper.answer`.

    Args:
        verify: have what arrives compared with its owner's sums. A peer that keeps none is refused then.
        clock: for the deadlines of questions.
    """

    def __init__(self, *, verify: bool, clock: Clock | None = None) -> None:
        super().__init__()
        self.verifies = verify
        self._clock = clock
        self._keeper: SumKeeper | None = None

    @abstractmethod
    def _move(self, connection: Connection[L], pairs: Sequence[BlockPair], *, reads: bool) -> PostedTransfer:
        """Post the transfer of bytes. Raises as :meth:`Transport.read` does."""

    @abstractmethod
    def _ask(self, link: L, body: bytes) -> Asked:
        """Send a peer a question.

        Raises:
            TransportError: it cannot be sent.
        """

    def offer(self, block_ids: Sequence[int]) -> None:
        self._require_registered()
        if self._keeper is not None:
            self._keeper.offer(block_ids)

    def withdraw(self, block_ids: Sequence[int]) -> None:
        self.require_process()
        if self._keeper is not None:
            self._keeper.withdraw(block_ids)

    def describe_state(self) -> dict[str, Any]:
        return {**super().describe_state(), "verify": self.verifies}

    def _require_agreed(self, peer_verifies: bool) -> None:
        """Raises TransportError where this side is to verify what the peer keeps no sums of."""
        require_agreed(self.verifies, peer_verifies)

    def _post_checked(
        self, connection: Connection[L], pairs: Sequence[BlockPair], *, reads: bool, peer_verifies: bool
    ) -> PostedTransfer:
        """Move pairs that were checked, and verify them where this side is to.

        Raises:
            TransportError: the peer is to compare what it is sent, and this side keeps no sums.
        """
        if self._keeper is None:
            if peer_verifies and not reads:
                raise TransportError(
                    "the peer is to compare what it is sent, and no sums are kept here; set `verify` alike on both."
                )
            return self._move(connection, pairs, reads=reads)
        return CheckedTransfer(
            self,
            connection,
            pairs,
            reads=reads,
            keeper=self._keeper,
            ask=partial(self._ask, connection.link),
            move=partial(self._move, connection, pairs, reads=reads),
            clock=self._clock,
        )
