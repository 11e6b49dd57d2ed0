"""The connectors for ``--kv-transfer-config``. A stock peer is met in the stock NIXL protocol, a pdkv one in ours.

::

    --worker-cls pdkv_connectors.vllm.worker.GrowableCPUWorker
    --kv-transfer-config '{"kv_connector": "PdkvNixlPullConnector", "kv_role": "kv_producer",
                           "kv_connector_module_path": "pdkv_connectors.vllm.nixl", "kv_buffer_device": "cpu"}'

Optional times in seconds, in ``kv_connector_extra_config``: see `ends_settings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector, NixlPushConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler

from pdkv_connectors.vllm.accounting import CountingScheduler
from pdkv_connectors.vllm.ends_scheduler import EndsScheduler
from pdkv_connectors.vllm.facade import LateConnector
from pdkv_connectors.vllm.nixl_workers import EndsPullWorker
from pdkv_connectors.vllm.serving import ServingScheduler, SleepingPushWorker
from pdkv_connectors.vllm.waiting import PublishingScheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class PdkvPullScheduler(
    PublishingScheduler, CountingScheduler, EndsScheduler, ServingScheduler, NixlPullConnectorScheduler
):
    """Stock pull with pdkv's ends, a count of what was loaded and what computed again, and of who waits."""


class PdkvNixlPullConnector(LateConnector, NixlPullConnector):
    """Decode reads the KV of a prompt from prefill (READ), from and into caches that pdkv has grown."""

    @classmethod
    def make_scheduler(
        cls, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> PdkvPullScheduler:
        return PdkvPullScheduler(vllm_config, engine_id, kv_cache_config)

    @classmethod
    def make_worker(cls, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> EndsPullWorker:
        return EndsPullWorker(vllm_config, engine_id, kv_cache_config)


class PdkvPushScheduler(
    PublishingScheduler, CountingScheduler, EndsScheduler, ServingScheduler, NixlPushConnectorScheduler
):
    """Stock push with pdkv's ends, a count of what was received and what computed again, and of who waits."""


class PdkvNixlPushConnector(LateConnector, NixlPushConnector):
    """Prefill writes the KV of a prompt to decode (WRITE), from and into caches that pdkv has grown."""

    @classmethod
    def make_scheduler(
        cls, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> PdkvPushScheduler:
        return PdkvPushScheduler(vllm_config, engine_id, kv_cache_config)

    @classmethod
    def make_worker(cls, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> SleepingPushWorker:
        return SleepingPushWorker(vllm_config, engine_id, kv_cache_config)
