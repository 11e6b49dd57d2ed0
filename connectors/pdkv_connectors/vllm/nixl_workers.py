"""The stock NIXL workers, with what stock peers say led to pdkv's leases."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.logger import init_logger

from pdkv.transfer import FailCode

if TYPE_CHECKING:
    from pdkv_connectors.vllm.ends import WorkerEnds

logger = init_logger(f"vllm.{__name__}")


class EndsPullWorker(NixlPullConnectorWorker):
    """Stock pull. Without `ends` it is stock pull altogether."""

    ends: WorkerEnds | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._notifications: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        #: Requests of which the stock code could make nothing, and why, since the scheduler was told last.
        self.unreadable: dict[str, str] = {}
        super().__init__(*args, **kwargs)

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        """Stock, and what it raises fails this request.

        It pairs the blocks that a request names with ours by assertions: too few of them, or of another number of
        cache groups, would end the engine. Here is where both are known. What was posted before ends by itself.
        """
        try:
            super()._read_blocks_for_req(req_id, meta)
        except Exception as error:
            logger.exception("pdkv: the blocks that request %s names cannot be read", req_id)
            reason = "the blocks that it names do not pair with those that it needs here"
            self.unreadable[req_id] = f"{FailCode.BAD_BLOCKS}: {reason} ({type(error).__name__})"
            self._failed_recv_reqs.put(req_id)

    def make_progress(self) -> None:
        """Let NIXL move bytes, also those of reads from here; any thread."""
        for notifications in self.nixl_wrapper.get_new_notifs().values():
            for notification in notifications:
                self._notifications.put(notification)

    def _get_new_notifs(self) -> set[str]:
        if self.ends is None:
            return super()._get_new_notifs()
        self.make_progress()
        while not self._notifications.empty():
            self._tell(self.ends, self._notifications.get_nowait())
        return set()

    @staticmethod
    def _tell(ends: WorkerEnds, notification: bytes) -> None:
        text = notification.decode("utf-8", "replace")
        request_id, separator, consumers = text.rpartition(":")
        if text.startswith("HB:"):
            ends.stock_heartbeat(text[3:].split(","))
        elif separator and consumers.isdecimal():
            ends.stock_done(request_id, int(consumers))
        else:
            logger.warning("pdkv: a notification of %d bytes is none of vLLM's; it is ignored.", len(notification))

    # The writer of push has a counterpart only there.

    def offer_to_stock(self, request_id: str, block_ids: list[list[int]]) -> None:
        """Nothing to do: a stock D reads by itself."""

    def withdraw_from_stock(self, request_id: str) -> bool:
        """Always True: whatever a stock D still reads, it was told how long it may."""
        return True

    def sent_to_stock(self, finished_sending: set[str]) -> Iterable[str]:
        """None: a stock D notifies."""
        return ()


class EndsPushWorker(NixlPushConnectorWorker):
    """Stock push, whose writer thread serves stock decode engines. Without `ends` it is stock push altogether."""

    ends: WorkerEnds | None = None

    def make_progress(self) -> None:
        """Have the writer thread poll NIXL."""
        self._push_writer_wake.set()

    def _handle_heartbeat(self, payload: str) -> None:
        if self.ends is None:
            super()._handle_heartbeat(payload)
        else:
            self.ends.stock_heartbeat(payload.split(","))

    def offer_to_stock(self, request_id: str, block_ids: list[list[int]]) -> None:
        """A stock D that registers for this request gets these blocks written."""
        self._reqs_to_process.add(request_id)
        self._finished_blocks_inbox.put((request_id, block_ids))
        self._push_writer_wake.set()

    def withdraw_from_stock(self, request_id: str) -> bool:
        """Offer the blocks no more. Whether no WRITE reads them; else ask again."""
        self._evict_finished_inbox.put(request_id)
        self._push_writer_wake.set()
        with self._sending_transfers_lock:
            if request_id in self._sending_transfers:
                return False
        self._reqs_to_process.discard(request_id)
        return True

    def sent_to_stock(self, finished_sending: set[str]) -> Iterable[str]:
        """Requests whose WRITE the stock half has just seen to its end; taken out of `finished_sending`."""
        sent = set(finished_sending)
        finished_sending.clear()
        return sent
