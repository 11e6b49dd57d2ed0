"""The connector for ``--kv-transfer-config`` that speaks pdkv's own protocol, over any of its transports.

::

    --worker-cls pdkv_connectors.vllm.worker.GrowableCPUWorker
    --kv-transfer-config '{"kv_connector": "PdkvConnector", "kv_role": "kv_consumer",
                           "kv_connector_module_path": "pdkv_connectors.vllm.connector",
                           "kv_connector_extra_config": {"pdkv_side_channel_peers": "127.0.0.1:5600"}}'

Decode reads from prefill. Settings: `session_settings.py`.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from pdkv.errors import ConnectorError, SeamError, StateError
from pdkv.registry import find_transport
from pdkv_connectors.vllm import patches
from pdkv_connectors.vllm.accounting import CountingScheduler
from pdkv_connectors.vllm.late import BuiltLate
from pdkv_connectors.vllm.placement import layer_specs
from pdkv_connectors.vllm.session_orders import StepOrders, StepReports
from pdkv_connectors.vllm.session_scheduler import SessionScheduler
from pdkv_connectors.vllm.session_settings import ConnectorSettings
from pdkv_connectors.vllm.session_worker import SessionWorker
from pdkv_connectors.vllm.settings import EngineSettings
from pdkv_connectors.vllm.waiting import PublishingScheduler

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pdkv.kvcache import GrowableKVCache
    from pdkv_connectors.vllm.status import StatusFile

logger = init_logger(f"vllm.{__name__}")


class CountingSessionScheduler(PublishingScheduler, CountingScheduler, SessionScheduler):
    """And a count of what was loaded, of what had to be computed again, and of who waits."""


class PdkvConnector(BuiltLate, KVConnectorBase_V1, SupportsHMA):
    """Decode reads the KV of a prompt from prefill, from and into caches that pdkv has grown.

    Raises:
        ConnectorError: the model or the parallelism is one that it does not support.
    """

    registers_memory = True

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_supported(vllm_config, kv_cache_config)
        self.engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self.connector_scheduler: CountingSessionScheduler | None = None
        self.connector_worker: SessionWorker | None = None
        self._received: StepOrders | None = None
        #: Of this rank's registration; 0 before there is one.
        self.generation = 0
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = CountingSessionScheduler(vllm_config, self.engine_id, kv_cache_config)
        elif not patches.is_growable(vllm_config):
            raise ConnectorError(
                f"PdkvConnector registers a growable KV cache, so it needs a growable worker; add --worker-cls "
                f"{patches.DEFAULT_WORKER_CLS}."
            )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Asked by 0.33 at the start."""
        return True

    # Late building and sleep, on a worker; see `BuiltLate` and `pdkv.lifecycle`.

    @staticmethod
    def warmup_metadata() -> StepOrders:
        return StepOrders()

    def build(self, config: KVCacheConfig, views: dict[str, torch.Tensor]) -> None:
        if self.connector_worker is not None:
            raise SeamError("the KV connector is built already; build() is called once, when the cache has grown.")
        settings = ConnectorSettings.of(self._vllm_config)
        rank, model = get_tensor_model_parallel_rank(), self._vllm_config.model_config
        zero_received = EngineSettings.from_environment().corrupt_received_kv
        if zero_received:
            logger.warning(
                "PDKV_CORRUPT_RECEIVED_KV is set: each KV block that arrives is zeroed. Never serve with it."
            )
        self.connector_worker = SessionWorker(
            find_transport(settings.transport, verify=settings.verify),
            f"{self.engine_id[:200]}/{uuid.uuid4().hex[:12]}/{rank}",
            rank,
            shape=shape_of(config),
            num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
            num_ranks=self._vllm_config.parallel_config.tensor_parallel_size,
            zero_received=zero_received,
        )

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        worker = self._built()
        worker.register(cache)
        self.generation = worker.registration.engine.generation

    def unregister_kv_cache(self) -> None:
        if self.connector_worker is not None:
            self.connector_worker.unregister()

    def report_to(self, status: StatusFile) -> None:
        """Not here: the workers say it to the scheduler's half, which writes it down for all of them."""

    def finish_fixed(self, status: StatusFile) -> None:
        raise ConnectorError(
            "PdkvConnector transfers growable KV caches only, and this one stays fixed (a warning above says why); use "
            "PdkvNixlPullConnector for this model."
        )

    @property
    def agent(self) -> Any:
        """None: the transport probes by itself."""
        return None

    @property
    def registered_ranges(self) -> tuple[tuple[int, int], ...]:
        """`(address, nbytes)` of what is registered now."""
        transport = None if self.connector_worker is None else self.connector_worker.transport
        geometry = getattr(transport, "geometry", None)
        if geometry is None:
            return ()
        return tuple((geometry.base + extent.offset, extent.nbytes) for extent in geometry.extents())

    def refuse_transfers(self) -> None:
        """Done by the scheduler's half, as is all that concerns peers and requests."""

    def resume_transfers(self) -> None:
        """As above."""

    def holders(self) -> tuple[str, ...]:
        """As above: none that only a worker would know of."""
        return ()

    def abort_transfers(self, reason: str) -> None:
        """As above."""

    def withdraw(self) -> None:
        """As above: peers have been told before the workers are."""

    def publish(self, generation: int) -> None:
        """As above: vLLM takes the new registration from :meth:`get_handshake_metadata`."""

    # A worker's steps. Before `build`, and in warmup, there is nothing to do.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """After the step's new blocks have been zeroed: what was ordered."""
        if self.connector_worker is not None and isinstance(self._connector_metadata, StepOrders):
            self._received = self._connector_metadata
            self.connector_worker.work_off(self._received.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded within a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved within a step."""

    def wait_for_save(self) -> None:
        """Nothing is saved within a step."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What the scheduler's half wants vLLM's scheduler to hear."""
        step, self._received = self._received, None
        if step is None:
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(
            finished_sending=step.sent, finished_recving=step.received, failed_recving=step.failed
        )

    def build_connector_worker_meta(self) -> StepReports | None:
        return None if self.connector_worker is None else self.connector_worker.collect()

    def get_handshake_metadata(self) -> Any:
        if self.connector_worker is None:
            raise SeamError(
                "vLLM asked for the handshake before the KV cache was extended, so the block count seam did not fire; "
                "is the pdkv plug-in loaded (VLLM_PLUGINS must be unset or name pdkv)?"
            )
        return self.connector_worker.registration

    # The scheduler.

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._scheduler().set_registrations(metadata)

    def on_new_request(self, request: Any) -> None:
        self._scheduler().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        return self._scheduler().build_connector_meta(scheduler_output)  # type: ignore[no-any-return]

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler().request_finished(request, block_ids)

    # Both.

    def shutdown(self) -> None:
        if self.connector_scheduler is not None:
            self.connector_scheduler.shutdown()
        self.unregister_kv_cache()

    def _scheduler(self) -> CountingSessionScheduler:
        if self.connector_scheduler is None:
            raise SeamError("vLLM called a worker's connector as if it were the scheduler's.")
        return self.connector_scheduler

    def _built(self) -> SessionWorker:
        if self.connector_worker is None:
            raise StateError("the KV connector is not built yet; call build() before register_kv_cache().")
        return self.connector_worker


def require_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse what it would transfer wrongly or not at all.

    Raises:
        ConnectorError: one sentence with the reason.
    """
    parallel = vllm_config.parallel_config
    reasons = {
        f"{len(kv_cache_config.kv_cache_groups)} KV cache groups (a hybrid of several kinds of layer)": len(
            kv_cache_config.kv_cache_groups
        )
        > 1,
        "layers with a recurrent state": kv_cache_config.has_mamba_layers,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        "speculative decoding that looks ahead of the prompt": vllm_config.num_prefill_lookahead_tokens > 1,
    }
    found = ", ".join(reason for reason, present in reasons.items() if present)
    if found:
        raise ConnectorError(
            f"PdkvConnector cannot transfer the KV of an engine with {found}; use PdkvNixlPullConnector."
        )


def shape_of(config: KVCacheConfig) -> str:
    """What a block is, in words that peers compare."""
    specs = sorted(
        {(type(spec).__name__, spec.block_size, spec.page_size_bytes) for spec in layer_specs(config).values()}
    )
    pages = "; ".join(f"{kind} of {tokens} tokens in {nbytes} bytes" for kind, tokens, nbytes in specs)
    return f"{config.kv_cache_layout}, {len(layer_specs(config))} layers, {pages}"[:512]
