"""The in-process transport with the checks that transports between processes have: all of them real but the channel."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from pdkv.errors import TransportError
from pdkv.kvcache import GrowableKVCache
from pdkv.transfer.base import PostedTransfer
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection
from pdkv.transfer.clock import Clock
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.inproc import InprocTransport
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.transport import TransferState
from pdkv_connectors.checking.keeper import SumKeeper
from pdkv_connectors.checking.transport import CheckingTransport


def nothing() -> None:
    """What happens beside a transfer."""


class AskedInproc:
    """A question whose answer goes a step further each time it is looked for."""

    def __init__(self, steps: Generator[None, None, bytes] | None) -> None:
        self._steps = steps

    def answer(self) -> bytes | None:
        if self._steps is None:
            return None
        try:
            next(self._steps)
        except StopIteration as done:
            body: bytes = done.value
            return body
        return None


class CheckedInproc(CheckingTransport[str], InprocTransport):
    """See the module's docstring.

    Attributes:
        before_move, on_arrival: called before bytes move, and when all have.
        said: takes the answers of peers and gives what is to be heard in their place.
        is_silent: peers hear nothing.
        questions: what was asked.
    """

    #: The owner's sums are made in the thread of whoever asks, also while the owner takes its memory back in its own.
    fences = False

    def __init__(self, *, copies_per_poll: int | None = None, clock: Clock | None = None) -> None:
        super().__init__(verify=True, clock=clock)
        self.copies_per_poll = copies_per_poll
        self.before_move: Callable[[], None] = nothing
        self.on_arrival: Callable[[], None] = nothing
        self.said: Callable[[bytes], bytes] = lambda body: body
        self.is_silent = False
        self.questions: list[bytes] = []

    @property
    def keeper(self) -> SumKeeper:
        if self._keeper is None:
            raise TransportError("nothing is registered")
        return self._keeper

    def _do_register(self, cache: GrowableKVCache, geometry: CacheGeometry, engine: EngineRef) -> None:
        self._keeper = SumKeeper(cache, geometry, engine, self.counts)
        super()._do_register(cache, geometry, engine)

    def _do_unregister(self) -> None:
        super()._do_unregister()
        self.keeper.close()
        self._keeper = None

    def _do_post(self, connection: Connection[str], pairs: Sequence[BlockPair], *, reads: bool) -> PostedTransfer:
        return self._post_checked(connection, pairs, reads=reads, peer_verifies=True)

    def _move(self, connection: Connection[str], pairs: Sequence[BlockPair], *, reads: bool) -> PostedTransfer:
        self.before_move()
        inner = super()._do_post(connection, pairs, reads=reads)
        stock = inner._look

        def look() -> TransferState:
            if (state := stock()) is TransferState.DONE:
                self.on_arrival()
            return state

        inner._look = look  # type: ignore[method-assign]
        return inner

    def _ask(self, key: str, body: bytes) -> AskedInproc:
        peer = self.find(key)
        assert isinstance(peer, CheckedInproc)
        self.questions.append(body)
        return AskedInproc(None if self.is_silent else self._heard(peer, body))

    def _heard(self, peer: CheckedInproc, body: bytes) -> Generator[None, None, bytes]:
        return self.said((yield from peer.keeper.answer(body)))
