"""A process with a cache and an ipc transport: P or D of the tests. Started, never imported.

``python ipc_side_main.py REPLY_FD DRIVER [verify=0]``; commands are those of :class:`TransportSide` and these.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pdkv.errors import DriverError
from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig
from pdkv.memory import HostDriver, PhysicalChunk, open_driver
from pdkv.testing.child import serve
from pdkv.testing.transports.side import TransportSide
from pdkv_connectors.ipc import IpcTransport

if TYPE_CHECKING:
    import torch


class IpcSide(TransportSide):
    """One side, on the host or on CUDA."""

    def __init__(self, driver: str, verify: bool) -> None:
        super().__init__(lambda: IpcTransport(verify=verify, drop_timeout_s=2.0), driver)
        self._info = open_driver(driver)
        self._events: list[Any] = []

    @property
    def ipc(self) -> IpcTransport:
        assert isinstance(self.transport, IpcTransport)
        return self.transport

    def do_offer(self, blocks: list[int]) -> None:
        """Offer blocks, on CUDA behind all that the current stream has yet to do."""
        event = None
        if self._driver.name == "cuda":
            import torch

            event = torch.cuda.Event()
            event.record()
            self._events.append(event)
        self.ipc.offer(blocks, after=event.cuda_event if event is not None else None)

    def do_refuse_imports(self) -> None:
        """Have the memory driver of this process answer as one does whose card cannot reach the peer's."""

        def refuse(driver: HostDriver, fd: int, nbytes: int) -> PhysicalChunk:
            raise DriverError("cuMemSetAccess failed with CUDA_ERROR_INVALID_DEVICE")

        HostDriver.import_fd = refuse  # type: ignore[method-assign]

    def do_offers_pending(self) -> int:
        self.ipc.progress()
        return self.ipc.num_offers_pending

    def do_mark_slowly(self, block: int, value: int, cycles: int) -> None:
        """CUDA: queue work of so many cycles, and behind it the filling of a block; wait for neither."""
        import torch

        torch.cuda._sleep(cycles)
        for view in self._views():
            view[block].view(torch.uint8).fill_(value)

    def do_mark_quietly(self, layer: int, block: int, position: int) -> None:
        """Change one byte of a block and tell nobody."""
        self._page_bytes(layer, block)[position] ^= 1
        self._driver.synchronize()

    def do_swap_words(self, layer: int, block: int, first: int, second: int) -> None:
        """Let two 64-bit words of a block change places."""
        import torch

        words = self._page_bytes(layer, block).view(torch.int64)
        words[[first, second]] = words[[second, first]]
        self._driver.synchronize()

    def do_copy_piece(self, layer: int, source: int, block: int, begin: int, nbytes: int) -> None:
        """Put a piece of another block at its place in this one, as where a write was left out."""
        pieces = [self._page_bytes(layer, index)[begin : begin + nbytes] for index in (source, block)]
        pieces[1].copy_(pieces[0])
        self._driver.synchronize()

    def _page_bytes(self, layer: int, block: int) -> torch.Tensor:
        """uint8 over a page, in the order of memory, whatever the layout."""
        import torch

        page = self._views()[layer][block]
        return page.as_strided((page.numel(),), (1,)).view(torch.uint8)

    def do_build_rank(self, heads: int, tokens: int) -> None:
        """A cache of a rank that has so many heads, in blocks of so many tokens; all zero."""
        spec = AttentionSpec(heads, tokens, 16, "float32")
        config = KVCacheConfig.uniform(["layer.0", "layer.1"], spec, 24)
        self._cache = GrowableKVCache(config, self._driver)
        self._cache.commit(24)

    def do_number(self, blocks: list[int], first_head: int) -> None:
        """Give each token of a prompt in these blocks, and each of the model's heads, a number of its own."""
        for view, wanted in zip(self._views(), self._numbers(blocks, first_head), strict=True):
            view[blocks] = wanted

    def do_numbered(self, blocks: list[int], first_head: int, first: int, end: int) -> list[bool]:
        """Whether tokens `first` to `end` have these numbers, and what is before and after is zero."""
        import torch

        found = []
        for view, wanted in zip(self._views(), self._numbers(blocks, first_head), strict=True):
            by_token = wanted.transpose(1, 2).flatten(0, 1)  # a copy, [tokens, H, C]
            by_token[:first] = by_token[end:] = 0
            found.append(torch.equal(view[blocks].transpose(1, 2).flatten(0, 1), by_token))
        return found

    def _numbers(self, blocks: list[int], first_head: int) -> list[torch.Tensor]:
        """``[blocks, H, N, C]`` of each layer."""
        import torch

        result = []
        for layer, view in enumerate(self._views()):
            heads, tokens, content = view.shape[1:]
            token = torch.arange(len(blocks) * tokens).view(len(blocks), 1, tokens, 1)
            head = torch.arange(first_head, first_head + heads).view(1, heads, 1, 1)
            number = 1 + token + 1000 * head + 10000 * layer
            result.append(number.expand(len(blocks), heads, tokens, content).float().clone())
        return result

    def do_release_report(self) -> list[int]:
        report = self.cache.release_physical()
        return [report.released, report.given_back, report.pinned]

    def do_free(self) -> int:
        """Free memory as the driver counts it."""
        return self._info.memory_info().free


if __name__ == "__main__":
    side = IpcSide(sys.argv[2], "verify=0" not in sys.argv[3:])
    serve(side, int(sys.argv[1]), side.idle)
