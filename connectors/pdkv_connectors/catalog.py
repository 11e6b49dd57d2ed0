"""The connectors that this distribution announces. Imports no engine and no transport."""

from __future__ import annotations

from pdkv.registry import ConnectorEntry

PDKV = ConnectorEntry(
    name="pdkv",
    vllm_class="PdkvConnector",
    vllm_module_path="pdkv_connectors.vllm.connector",
    summary="decode reads KV from prefill by pdkv's own protocol, over the transport of your choice",
    check="pdkv_connectors.vllm.before_start:check_session",
)

NIXL_PULL = ConnectorEntry(
    name="nixl-pull",
    vllm_class="PdkvNixlPullConnector",
    vllm_module_path="pdkv_connectors.vllm.nixl",
    summary="decode reads KV from prefill over NIXL, after prefill has finished",
    check="pdkv_connectors.vllm.before_start:check_nixl",
)

NIXL_PUSH = ConnectorEntry(
    name="nixl-push",
    vllm_class="PdkvNixlPushConnector",
    vllm_module_path="pdkv_connectors.vllm.nixl",
    summary="prefill writes KV to decode over NIXL, as soon as prefill has finished",
    check="pdkv_connectors.vllm.before_start:check_nixl",
)
