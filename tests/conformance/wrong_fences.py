"""Transports with one mistake in what they say of fences, or in how they fence READs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from wrong_transport import Wrong, caught_by

from pdkv.errors import TransportError
from pdkv.transfer.base import PostedTransfer
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.transport import TransferState

SAYS = caught_by("says_whether_it_fences_reads_from_a_peer")
KEEPS = caught_by("keeps_a_fenced_read_from_what_its_owner_has_taken_back")
ENDS = caught_by("ends_a_fenced_read_without_its_owner")


@SAYS
class FencesReadsFromAnybody(Wrong):
    def fences_reads(self, peer: EngineRef) -> bool:
        return True


@SAYS
class SaysItOfAnyGeneration(Wrong):
    def fences_reads(self, peer: EngineRef) -> bool:
        return self._connections.find(peer.engine_id) is not None


@SAYS
class RefusesToSayItOfWhomItDoesNotKnow(Wrong):
    def fences_reads(self, peer: EngineRef) -> bool:
        return self._connections.get(peer).peer == peer


@SAYS
class ChangesItsMindWhenItHasRead(Wrong):
    def fences_reads(self, peer: EngineRef) -> bool:
        return super().fences_reads(peer) and not self.counts["reads"]


@SAYS
class ChangesItsMindWhenThePeerHasUnregistered(Wrong):
    def fences_reads(self, peer: EngineRef) -> bool:
        if not super().fences_reads(peer):
            return False
        with suppress(TransportError):
            self.find(self._connections.get(peer).link)
            return True
        return False


@SAYS
class FencesWhatItCannotRead(Wrong):
    can_read = False


class LooksInItsOwnWay(Wrong):
    def look(self, transfer: Any, connection: Connection[str]) -> TransferState:
        """What a poll of a transfer does."""
        raise NotImplementedError

    def _do_post(self, connection: Connection[str], pairs: Sequence[BlockPair], *, reads: bool) -> PostedTransfer:
        transfer: Any = super()._do_post(connection, pairs, reads=reads)
        stock = transfer._look
        transfer.cache_of_peer, transfer.stock_look = self.find(connection.link).cache, stock
        transfer._look = lambda: self.look(transfer, connection)
        return transfer  # type: ignore[no-any-return]


@KEEPS
class LooksForItsPeerOnlyAsItPosts(LooksInItsOwnWay):
    def look(self, transfer: Any, connection: Connection[str]) -> TransferState:
        state: TransferState = transfer._move(SimpleNamespace(cache=transfer.cache_of_peer))
        return state


@KEEPS
class IsDoneWhenItsPeerHasGone(LooksInItsOwnWay):
    def look(self, transfer: Any, connection: Connection[str]) -> TransferState:
        state: TransferState = transfer.stock_look()
        return TransferState.DONE if state is TransferState.FAILED else state


@KEEPS
class WritesElsewhereWhenItsPeerHasGone(LooksInItsOwnWay):
    def look(self, transfer: Any, connection: Connection[str]) -> TransferState:
        state: TransferState = transfer.stock_look()
        if state is TransferState.FAILED and self.cache is not None:
            self.cache.views()["layer.1"][38].zero_()
        return state


@KEEPS
class StaysReachableWhenItIsClosed(Wrong):
    def close(self, *, timeout_s: float = 5.0) -> None:
        self._closed = True


@ENDS
class NeedsItsOwnerToEnd(LooksInItsOwnWay):
    def progress(self) -> None:
        self.counts["helped"] += 1

    def look(self, transfer: Any, connection: Connection[str]) -> TransferState:
        helped = self.find(connection.link).counts["helped"]
        transfer.helped_before = getattr(transfer, "helped_before", helped)
        return TransferState.FAILED if helped > transfer.helped_before else TransferState.RUNNING

    def read(self, peer: EngineRef, pairs: Sequence[BlockPair]) -> Any:
        transfer: Any = super().read(peer, pairs)
        transfer.abandon = lambda: False
        return transfer
