"""The seam "late connector": a connector that vLLM creates early and pdkv builds late.

vLLM creates the worker's connector before it allocates the KV cache, and hands it the tensors right after. A stock NIXL
connector copies the block count in its constructor and registers in `register_kv_caches`, both once only. So the class
that vLLM is given is a facade: its constructor builds nothing, warmup passes through it without effect, and
:meth:`LateConnector.build` builds the stock worker when the cache has its final size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.logger import init_logger

from pdkv.errors import ConnectorError, SeamError
from pdkv.transfer.blocks import block_ids
from pdkv_connectors.descriptors import require_to_start
from pdkv_connectors.vllm import patches, report
from pdkv_connectors.vllm.ends_events import events_of
from pdkv_connectors.vllm.facade_ends import EndsConnector
from pdkv_connectors.vllm.facade_sleep import SleepingConnector
from pdkv_connectors.vllm.guard import GuardedAgent
from pdkv_connectors.vllm.late import BuiltLate
from pdkv_connectors.vllm.settings import EngineSettings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pdkv import kvcache
    from pdkv_connectors.vllm.growth import GrowableWorker
    from pdkv_connectors.vllm.status import StatusFile

logger = init_logger(f"vllm.{__name__}")


class LateConnector(SleepingConnector, EndsConnector, BuiltLate, NixlBaseConnector):
    """A stock NIXL connector whose worker side is built by :meth:`build`.

    Subclasses mix in a stock connector class and say by `make_worker` what :meth:`build` builds, and by
    `make_scheduler` what the scheduler side is.
    """

    registers_memory = True

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # Past the stock constructor of the subclass's other base, which would build a NIXL agent at once.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        self._settings = EngineSettings.from_environment()
        self._received: dict[str, tuple[int, ...]] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._worker: Any = None
        self.connector_scheduler: Any = None
        self.connector_worker: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = self.make_scheduler(vllm_config, self.engine_id, kv_cache_config)
            return
        if not patches.is_growable(vllm_config):
            raise ConnectorError(
                f"{type(self).__name__} is built once the KV cache has grown, so it needs a growable worker; add "
                f"--worker-cls {patches.DEFAULT_WORKER_CLS}, or use vLLM's own NixlConnector."
            )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Asked by 0.33 at the start. As the stock pull connector: its sleep-mode agent is one of UCX."""
        return bool(kv_transfer_config.get_from_extra_config("backends", ["UCX"]) == ["UCX"])

    @classmethod
    def make_scheduler(cls, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> Any:
        """The scheduler side, built when vLLM asks for it: by then the block count is final."""
        raise NotImplementedError

    @classmethod
    def make_worker(cls, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> Any:
        """The stock worker side; its constructor builds the NIXL agent."""
        raise NotImplementedError

    @staticmethod
    def warmup_metadata() -> NixlConnectorMetadata:
        """What a hand-built scheduler step carries for this connector: nothing to load, nothing to send."""
        return NixlConnectorMetadata()

    # What the lifecycle asks of a connector (`pdkv.lifecycle.RegistersKVCache`), after :meth:`build`.

    def build(self, config: KVCacheConfig, views: dict[str, torch.Tensor]) -> None:
        """Build the stock worker, and with it the NIXL agent, for the final `config`. Registers nothing yet.

        Raises:
            SeamError: called twice, or the stock worker does not hold its agent where expected.
        """
        if self._worker is not None:
            raise SeamError("the KV connector is built already; the stock NIXL worker can register once only.")
        self.kv_cache_config, self._views = config, views
        self._worker = self.make_stock_worker()

    def make_stock_worker(self) -> Any:
        """A stock worker for the final config; see :meth:`build`, and `SleepingConnector`, which builds it anew.

        Raises:
            TransportError: too few file descriptors are left for its agent.
            SeamError: the stock worker does not hold its agent where expected.
        """
        require_to_start("the NIXL agent of this worker")
        with set_current_vllm_config(self._vllm_config), patches.quiet_nixl_agent():
            worker = self.make_worker(self._vllm_config, self.engine_id, self.kv_cache_config)
        if not hasattr(worker, "nixl_wrapper"):
            raise SeamError(
                f"{type(worker).__name__} has no attribute nixl_wrapper to guard; this vLLM version needs a change in "
                "pdkv_connectors/vllm/facade.py."
            )
        return worker

    def finish_fixed(self, status: StatusFile) -> None:
        """Build and register over a cache that vLLM allocated whole: all of it has memory, so nothing is guarded."""
        self.report_to(status)
        self.build(self.kv_cache_config, self._views)
        self._register()

    def _register(self) -> None:
        self._worker.register_kv_caches(self._views)
        self._begin_ends()
        self.connector_worker = self._worker
        if self._settings.corrupt_received_kv:
            logger.warning(
                "PDKV_CORRUPT_RECEIVED_KV is set: each KV block that arrives is zeroed. Never serve with it."
            )

    def rebuild_agent(self, reason: str) -> None:
        logger.warning("pdkv: building the NIXL agent anew: %s", reason)
        assert self._ends is not None
        cache = self._worker.nixl_wrapper.cache if isinstance(self._worker.nixl_wrapper, GuardedAgent) else None
        with self._ends.without_agent():
            self._destroy_worker()
            self.build(self.kv_cache_config, self._views)
            if cache is not None:
                self.register_kv_cache(cache)
            else:
                self._register()
        self._ends.published((0, self._worker.transfer_tp_rank), self._worker.xfer_handshake_metadata)

    @property
    def agent(self) -> Any:
        """The NIXL agent of the stock worker, guarded where the cache grows."""
        return self._worker.nixl_wrapper

    @property
    def registered_ranges(self) -> tuple[tuple[int, int], ...]:
        """`(address, nbytes)` of what NIXL holds registered now; not known of a fixed cache, which nobody guards."""
        if self.connector_worker is None or not isinstance(self.connector_worker.nixl_wrapper, GuardedAgent):
            return ()
        return tuple(self.connector_worker.nixl_wrapper.registered)

    # Until registered, the methods below do nothing: warmup runs real steps through them.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Kept, not registered: where the cache grows, these are views over addresses most of which have no memory."""
        self._views = kv_caches

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """Ignored: there is no host buffer in front of a growable cache (`kv_buffer_device` is the cache's device)."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.connector_worker is None:
            return
        metadata = self._connector_metadata
        if self._settings.corrupt_received_kv and isinstance(metadata, NixlConnectorMetadata):
            for req_id, meta in metadata.reqs_to_recv.items():
                self._received[req_id] = tuple(block for group in meta.local_block_ids for block in group)
            if (events := events_of(metadata)) is not None:
                self._received.update((req_id, block_ids(runs)) for req_id, runs in events.allocated.items())
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        if self.connector_worker is not None:
            super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.connector_worker is None:
            return KVConnectorTransferResults()
        results = super().get_transfer_results(finished_req_ids)
        if self._settings.corrupt_received_kv:
            self._zero_received(results.finished_recving or ())
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self.connector_worker is None else super().get_block_ids_with_load_errors()

    def get_handshake_metadata(self) -> Any:
        if self.connector_worker is None:
            raise SeamError(
                "vLLM asked for the handshake before the KV cache was extended, so the block count seam did not fire; "
                "is the pdkv plug-in loaded (VLLM_PLUGINS must be unset or name pdkv)?"
            )
        return super().get_handshake_metadata()

    def _zero_received(self, req_ids: Any) -> None:
        for req_id in req_ids:
            for block in self._received.pop(req_id, ()):
                for view in self._views.values():
                    view[block].zero_()


class BuildLate:
    """The connector factory of `lifecycle.extend`: builds the late half of the connector that vLLM created early."""

    registers_memory = True

    def __init__(self, worker: GrowableWorker, connector: LateConnector) -> None:
        self._worker = worker
        self.connector = connector

    def __call__(self, config: kvcache.KVCacheConfig) -> LateConnector:
        self.connector.report_to(report.status_file(self._worker))
        self.connector.build(self._worker.committed_config, self._worker.committed_views)
        return self.connector
