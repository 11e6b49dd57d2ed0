"""What a worker says of its KV cache once its size is final: one status file a rank, and a line in the log."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger

from pdkv_connectors.vllm.status import StatusFile

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv.lifecycle import ExtendReport, SleepReport, WakeReport
    from pdkv_connectors.vllm.growth import GrowableWorker

logger = init_logger(f"vllm.{__name__}")
_files: WeakKeyDictionary[GrowableWorker, StatusFile] = WeakKeyDictionary()


def status_file(worker: GrowableWorker) -> StatusFile:
    """The status file of this rank, which its connector writes too."""
    found = _files.get(worker)
    if found is None:
        found = _files[worker] = StatusFile(worker.settings.status_dir, f"worker-rank{worker.rank}")
    return found


def write_growable(worker: GrowableWorker, cache: GrowableKVCache, extended: ExtendReport) -> None:
    """Of a cache that has been extended."""
    worker.extended_facts = {
        **cache.describe(),
        "growable": True,
        "fixed_because": None,
        "warmup_blocks": worker.warmup_blocks,
        "final_blocks": extended.blocks,
        "connector_created_after_extend": extended.connector_created_after_extend,
    }
    _write(worker, "extended", worker.extended_facts)


def write_asleep(worker: Any, cache: GrowableKVCache, slept: SleepReport) -> None:
    """Of a cache that has been put to sleep: what it gave back."""
    worker.sleep_facts = {
        "given_back": slept.given_back,
        "released_bytes": slept.released,
        "pinned": slept.pinned,
        "sleep_times_s": dict(slept.times_s),
    }
    _update(worker, cache, "asleep")


def write_awake(worker: Any, cache: GrowableKVCache, woken: WakeReport) -> None:
    """Of a cache that has been woken."""
    worker.sleep_facts = {**getattr(worker, "sleep_facts", {}), "wake_times_s": dict(woken.times_s)}
    _update(worker, cache, "awake")


def write_lent(worker: Any, cache: GrowableKVCache) -> None:
    """Of a cache that has been lent to a weight update, and is back."""
    worker.sleep_facts = getattr(worker, "sleep_facts", {})
    _update(worker, cache, "weights updated")


def _update(worker: Any, cache: GrowableKVCache, event: str) -> None:
    """Write the last facts of :func:`write_growable` again, with what has changed of the cache."""
    worker.extended_facts = {**worker.extended_facts, **cache.describe()}
    _write(worker, event, {**worker.extended_facts, **worker.sleep_facts})


def write_fixed(worker: GrowableWorker) -> None:
    """Of a cache that the stock worker allocated whole: reserved, warmed up with and committed are the same."""
    config = worker.model_runner.kv_cache_config
    nbytes = max((tensor.offset + tensor.size for tensor in config.kv_cache_tensors), default=0)
    counts = dict.fromkeys(("capacity_blocks", "warmup_blocks", "final_blocks", "committed_blocks"), config.num_blocks)
    _write(
        worker,
        "fixed",
        {
            **counts,
            "growable": False,
            "fixed_because": worker.fixed_because,
            "bytes_reserved": nbytes,
            "bytes_committed": nbytes,
            "segments": 1,
            "chunks_per_segment": 1,
            "generation": 0,
            "connector_created_after_extend": has_kv_transfer_group(),
        },
    )


def _write(worker: GrowableWorker, event: str, facts: dict[str, Any]) -> None:
    config = worker.model_runner.kv_cache_config
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    status = {
        **facts,
        "registration": getattr(connector, "generation", 0),
        "reading": None if worker.reading is None else asdict(worker.reading),
        "warmup_bytes": None if worker.cache is None else worker.cache.physical_bytes_for(worker.warmup_blocks),
        "block_size": config.kv_cache_groups[0].kv_cache_spec.block_size,
        "times_s": worker.times_s,
        "probe_gb_per_s": worker.probe_gb_per_s,
        "vllm_version": vllm.__version__,
    }
    status_file(worker).update(status)
    logger.info("pdkv: %s; %s", event, status)
