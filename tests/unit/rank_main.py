"""One rank of `test_rank_agreement`, in a process of its own: sizes a real cache on a host driver with a limit.

Arguments: rank, number of ranks, file to meet at, memory limit in bytes. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

from torch import distributed

from pdkv.kvcache import GrowableKVCache, KVCacheConfig, PageSpec
from pdkv.kvcache.ranks import minimum_over
from pdkv.kvcache.sizing import MemoryReading, SizingConstants, committable_blocks, decide_final_blocks
from pdkv.lifecycle import extend
from pdkv.memory import HostDriver, LimitedDriver

MEET_TIMEOUT_S = 60.0
CONSTANTS = SizingConstants(margin_floor_bytes=1 << 20, margin_fraction=0.0)


def main() -> None:
    rank, ranks, meet_at, limit = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meet_at}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=MEET_TIMEOUT_S),
    )
    agree = minimum_over(distributed.group.WORLD)
    driver = LimitedDriver(HostDriver(4096), limit)
    spec = PageSpec(num_heads=1, num_states=16, content_bytes=256, block_size=16)
    with GrowableKVCache(KVCacheConfig.uniform(["a", "b"], spec, 8192), driver) as cache:
        free = driver.memory_info().free
        own = committable_blocks(cache, free_memory=free, constants=CONSTANTS)
        cache.commit(committable_blocks(cache, free_memory=free, constants=CONSTANTS, agree_minimum=agree))
        warmup_blocks = cache.num_committed_blocks
        reading = MemoryReading(init_free_memory=limit, free_memory=driver.memory_info().free, requested_memory=limit)
        final = decide_final_blocks(cache, reading=reading, constants=CONSTANTS, agree_minimum=agree)
        report = extend(cache, final.local_blocks, agree_minimum=agree)
        print(
            json.dumps(
                {
                    "own_warmup_blocks": own,
                    "warmup_blocks": warmup_blocks,
                    "own_final_blocks": final.local_blocks,
                    "agreed_final_blocks": final.blocks,
                    "committed_blocks": report.blocks,
                    "message": final.message,
                }
            )
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
