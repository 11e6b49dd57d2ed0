"""Transports that verify, as factories by name: for benches whose two sides are processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdkv.transfer.base import PostedTransfer
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.transport import TransferState, Transport
from pdkv_connectors.nixl.transport import NixlTransport
from pdkv_connectors.ucx.transport import UcxTransport


def nixl() -> Transport:
    return NixlTransport(verify=True)


def ucx() -> Transport:
    return UcxTransport(verify=True)


class Damages:
    """Mixed into a transport: a bit of what it moves changes on the way.

    Of a READ it is one of the last block where it has arrived; of a WRITE one of its source, which is as it was when
    the bytes are on the other side.
    """

    cache: Any

    def _move(self, connection: Any, pairs: Sequence[BlockPair], *, reads: bool) -> PostedTransfer:
        block = pairs[-1].destination if reads else pairs[-1].source
        if not reads:
            self._flip(block)
        inner: PostedTransfer = super()._move(connection, pairs, reads=reads)  # type: ignore[misc]
        stock = inner._look

        def look() -> TransferState:
            if (state := stock()) is TransferState.DONE:
                self._flip(block)
            return state

        inner._look = look  # type: ignore[method-assign]
        return inner

    def _flip(self, block: int) -> None:
        import torch

        page = list(self.cache.committed_views().values())[1][block]
        page.view(torch.int32)[-1, -1, -1] ^= 1


class DamagingNixl(Damages, NixlTransport):
    def __init__(self) -> None:
        super().__init__(verify=True)


class DamagingUcx(Damages, UcxTransport):
    def __init__(self) -> None:
        super().__init__(verify=True)
