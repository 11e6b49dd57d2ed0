"""The engine core's half of growth: after warmup one block count for all ranks, the scheduler and the handshake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdkv.errors import SeamError
from pdkv.kvcache.sizing import require_room_for_one_request

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def grow_engine(engine_core: Any, vllm_config: VllmConfig, config: KVCacheConfig) -> KVCacheConfig:
    """After warmup: have all ranks agree on a block count, extend them, make the engine's pool that large.

    Where the cache cannot grow, the count is the one that vLLM has computed, and only the connector is finished.

    Raises:
        CapacityError: the count would be too small for one request of `max_model_len` tokens.
        SeamError: a rank did not end up with the agreed count.
    """
    from vllm.v1.core.kv_cache_utils import update_kv_cache_capacity

    if not all(engine_core.collective_rpc("pdkv_can_grow")):
        engine_core.collective_rpc("pdkv_finish_fixed")
        return config
    blocks = min(engine_core.collective_rpc("pdkv_propose_blocks"))
    block_size = config.kv_cache_groups[0].kv_cache_spec.block_size
    require_room_for_one_request(blocks, block_size, vllm_config.model_config.max_model_len)
    counts = engine_core.collective_rpc("pdkv_extend", args=(blocks,))
    if set(counts) != {blocks}:
        raise SeamError(f"the ranks should all have extended to {blocks} blocks, but have {counts}.")
    config.num_blocks = blocks
    vllm_config.cache_config.num_gpu_blocks = blocks
    update_kv_cache_capacity(vllm_config, config)
    return config
