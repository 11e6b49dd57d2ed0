"""Which engines speak pdkv's own protocol for the ends of requests, and what they say of themselves to fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION
from vllm.platforms import current_platform

from pdkv.transfer import Compatibility, Descriptor
from pdkv_connectors.vllm.ends import WorkerEnds
from pdkv_connectors.vllm.ends_settings import consumer_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def descriptor(vllm_config: VllmConfig, worker: Any) -> Descriptor:
    """What peers must know of a rank. `worker`: the stock worker, registered."""
    return Descriptor(
        compatibility=compatibility(vllm_config, worker),
        num_blocks=worker.kv_cache_config.num_blocks,
        metadata=worker.xfer_handshake_metadata.agent_metadata_bytes,
    )


def make_ends(
    vllm_config: VllmConfig, worker: Any, generation: int, report: Callable[[dict[str, Any]], None]
) -> WorkerEnds:
    """The worker's half for a stock worker that has registered its memory."""
    transfer = vllm_config.kv_transfer_config
    return WorkerEnds(
        worker,
        descriptor(vllm_config, worker),
        role=transfer.kv_role,
        settings=consumer_settings(
            transfer.kv_connector_extra_config or {},
            mode=worker._TRANSFER_MODE,
            on_failure=transfer.kv_load_failure_policy,
        ),
        host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        generation=generation,
        report=report,
    )


def why_stock_only(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why this engine speaks the stock protocol only; None where it speaks pdkv's to pdkv peers.

    What is named here moves other things than pairs of equal blocks between equal ranks.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config or {}
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        "layers with a recurrent state": kv_cache_config.has_mamba_layers,
        "bidirectional transfer": bool(extra.get("bidirectional_kv_xfer")),
        "a host buffer": not current_platform.is_cpu() and transfer is not None and transfer.kv_buffer_device == "cpu",
        "permuted layouts": transfer is not None and transfer.enable_permute_local_kv,
        "speculative decoding that looks ahead of the prompt": vllm_config.num_prefill_lookahead_tokens > 1,
        "sliding windows with bounded replay": any(
            getattr(group.kv_cache_spec, "prefix_replay_tokens", 0) > 0 for group in kv_cache_config.kv_cache_groups
        ),
    }
    found = [name for name, present in reasons.items() if present]
    return ", ".join(found) or None


def compatibility(vllm_config: VllmConfig, worker: Any) -> Compatibility:
    """What two engines must have in common. `worker`: the stock worker, registered."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    mode = f"{worker._TRANSFER_MODE}, NIXL connector {NIXL_CONNECTOR_VERSION}, vLLM {vllm.__version__}"
    shape = f"{worker.transfer_tp_size} ranks, {worker.backend_name}, kernel blocks of {worker.block_size}"
    heads = f"{model.get_total_num_kv_heads()} KV heads of {model.get_head_size()}"
    return Compatibility(
        model=str(model.model)[:512],
        dtype=str(model.dtype),
        cache_dtype=str(cache.cache_dtype),
        layout=f"{worker.kv_cache_layout}, {model.get_total_num_hidden_layers()} layers, {heads}",
        block_size=cache.block_size,
        connector=f"{mode}; {shape}",
    )
