"""The connectors for ``--kv-transfer-config``, by the stock NIXL protocol: a stock peer can be on the other side.

::

    --worker-cls pdkv_connectors.vllm.worker.GrowableCPUWorker
    --kv-transfer-config '{"kv_connector": "PdkvNixlPullConnector", "kv_role": "kv_producer",
                           "kv_connector_module_path": "pdkv_connectors.vllm.nixl", "kv_buffer_device": "cpu"}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector, NixlPushConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from pdkv_connectors.vllm.accounting import CountingScheduler
from pdkv_connectors.vllm.facade import LateConnector
from pdkv_connectors.vllm.waiting import PublishingScheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class CountingPullScheduler(PublishingScheduler, CountingScheduler, NixlPullConnectorScheduler):
    """Stock pull, and a count of what was loaded, of what had to be computed again, and of who waits."""


class PdkvNixlPullConnector(LateConnector, NixlPullConnector):
    """Decode reads the KV of a prompt from prefill (READ), from and into caches that pdkv has grown."""

    @classmethod
    def make_scheduler(
        cls, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> CountingPullScheduler:
        return CountingPullScheduler(vllm_config, engine_id, kv_cache_config)

    @classmethod
    def make_worker(
        cls, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> NixlPullConnectorWorker:
        return NixlPullConnectorWorker(vllm_config, engine_id, kv_cache_config)


class CountingPushScheduler(PublishingScheduler, CountingScheduler, NixlPushConnectorScheduler):
    """Stock push, and a count of what was received, of what had to be computed again, and of who waits."""


class PdkvNixlPushConnector(LateConnector, NixlPushConnector):
    """Prefill writes the KV of a prompt to decode (WRITE), from and into caches that pdkv has grown."""

    @classmethod
    def make_scheduler(
        cls, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> CountingPushScheduler:
        return CountingPushScheduler(vllm_config, engine_id, kv_cache_config)

    @classmethod
    def make_worker(
        cls, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> NixlPushConnectorWorker:
        return NixlPushConnectorWorker(vllm_config, engine_id, kv_cache_config)
