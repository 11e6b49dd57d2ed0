"""The connector's half of pdkv's ends: hands vLLM's calls on a worker to `ends.WorkerEnds`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from pdkv_connectors.vllm import ends_support
from pdkv_connectors.vllm.ends_events import WorkerNews, events_of
from pdkv_connectors.vllm.handshake import stamp

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pdkv_connectors.vllm.ends import WorkerEnds
    from pdkv_connectors.vllm.status import StatusFile

logger = init_logger(f"vllm.{__name__}")


class EndsConnector:
    """Mixed in before a stock connector class."""

    _vllm_config: VllmConfig
    _worker: Any
    kv_cache_config: KVCacheConfig
    connector_worker: Any

    #: Whether a request may be reported as failed before it has blocks (see `patches`).
    fails_queued = True

    _ends: WorkerEnds | None = None
    _status: StatusFile | None = None
    _ends_generation = 0

    @property
    def ends(self) -> WorkerEnds | None:
        """How requests end on this rank; None before registration, and where only the stock protocol is spoken."""
        return self._ends

    def report_to(self, status: StatusFile) -> None:
        """Where to write what the ends of requests count, under the key ``ends``."""
        self._status = status

    def _begin_ends(self) -> None:
        """The stock worker has registered: meet peers, or meet them again."""
        worker = self._worker
        self._ends_generation += 1
        if self._ends is not None:
            descriptor = ends_support.descriptor(self._vllm_config, worker)
            self._ends.attach(worker, descriptor, self._ends_generation)
        elif (reason := ends_support.why_stock_only(self._vllm_config, self.kv_cache_config)) is not None:
            logger.warning("pdkv: requests end by the stock protocol alone, because of %s", reason)
            return
        else:
            self._ends = ends_support.make_ends(self._vllm_config, worker, self._ends_generation, self._report_ends)
            self._ends.start()
        worker.xfer_handshake_metadata = stamp(worker.xfer_handshake_metadata, self._ends.info)

    def rebuild_agent(self, reason: str) -> None:
        """Destroy the NIXL agent and build another: no transfer of the old one can touch memory any more (I11).

        Raises:
            TransportError: the old agent cannot be destroyed.
        """
        raise NotImplementedError

    def _report_ends(self, ends: dict[str, Any]) -> None:
        if self._status is None:
            return
        try:
            self._status.update({"ends": ends})
        except OSError as error:
            # A full disk must not end an engine that serves; the launcher sees that the file is old.
            logger.error("cannot write the status file of this rank: %s", error)

    # Called by vLLM in each step.

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]
        if self._ends is not None and (events := events_of(connector_metadata)) is not None:
            self._ends.take(events)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)  # type: ignore[misc]
        events = events_of(self._connector_metadata)  # type: ignore[attr-defined]
        if self._ends is not None and events is not None:
            self._ends.load(events)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results: KVConnectorTransferResults = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        if self._ends is not None:
            if (reason := self._ends.why_rebuild()) is not None:
                self.rebuild_agent(reason)
            self._ends.collect(results)
        if (events := events_of(self._connector_metadata)) is not None:  # type: ignore[attr-defined]
            results.failed_recving |= events.refused
            results.finished_recving |= events.untouched
        return results

    def build_connector_worker_meta(self) -> Any:
        news = None if self._ends is None else self._ends.take_news()
        if not (unreadable := getattr(self._worker, "unreadable", None)):
            return news
        self._worker.unreadable = {}
        news = news or WorkerNews()
        news.failed = {**unreadable, **news.failed}
        return news

    def shutdown(self) -> None:
        if self._ends is not None:
            self._ends.close()
        super().shutdown()  # type: ignore[misc]
