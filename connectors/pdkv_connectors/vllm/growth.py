"""The order in which a vLLM engine gets a growable KV cache, shared by all worker classes.

::

    engine core                                   worker
    _initialize_kv_caches (stock, wrapped)
      determine_available_memory            ->    can it grow? then answer with the capacity to reserve
      initialize_from_config                ->    pad, reserve, commit the warmup prefix; stock allocates from it
      compile_or_warm_up_model              ->    real forward on the prefix; then the stock warmup
    agree.grow_engine
      pdkv_propose_blocks                   ->    measure what is left; the minimum over all ranks
      check against max_model_len
      pdkv_extend                           ->    commit, one chunk a segment; rebind; only now build the connector
      block count to scheduler and handshake

A model or layout whose cache cannot grow gets a fixed one: the stock worker then does everything as it always does, a
warning says why, and only the late connector is left to be finished (`pdkv_finish_fixed`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger

from pdkv import lifecycle, locks
from pdkv.errors import SeamError, StateError
from pdkv.kvcache import GrowableKVCache
from pdkv.kvcache.sizing import (
    MemoryReading,
    SizingConstants,
    committable_blocks,
    decide_final_blocks,
)
from pdkv_connectors.vllm import compat, rebind, report, warmup
from pdkv_connectors.vllm.backing import ServeFromReservation
from pdkv_connectors.vllm.capacity import CapacityWorker
from pdkv_connectors.vllm.page_interior import interior_of
from pdkv_connectors.vllm.placement import to_pdkv, with_placements
from pdkv_connectors.vllm.settings import EngineSettings
from pdkv_connectors.vllm.sleep import SleepingWorker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pdkv import kvcache
    from pdkv.memory import MemoryDriver
    from pdkv_connectors.vllm.facade import BuildLate

logger = init_logger(f"vllm.{__name__}")


class GrowableWorker(CapacityWorker, SleepingWorker):
    """Mixed in before a stock vLLM worker class. See the module's docstring for the order of calls."""

    platform: str  # in `compat.SUPPORTED`

    # From the stock worker.
    vllm_config: VllmConfig
    cache_config: Any
    model_config: Any
    scheduler_config: Any
    model_runner: Any
    rank: int

    # Set by growth.
    committed_config: KVCacheConfig
    committed_views: dict[str, torch.Tensor]
    extended_facts: dict[str, Any]

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        compat.check(self.platform, with_connector=vllm_config.kv_transfer_config is not None)
        self.settings = EngineSettings.from_environment()
        self.constants = SizingConstants.from_environment()
        self.cache: GrowableKVCache | None = None
        self.fixed_because: str | None = None
        self.reading: MemoryReading | None = None
        self._backing: ServeFromReservation | None = None
        self._first_pass_bytes = 0
        self.warmup_blocks = 0
        self._extended = False
        self._warming_up = False
        self.times_s: dict[str, float] = {}
        self.probe_gb_per_s: float | None = None
        super().__init__(vllm_config, *args, **kwargs)
        self._lock_status_dir()

    def _lock_status_dir(self) -> None:
        """Refuse a status folder that another engine writes to. Data-parallel engines of one server share theirs."""
        if self.settings.status_dir is None or self.rank != 0:
            return
        index = self.vllm_config.parallel_config.data_parallel_index
        name = locks.ENGINE_LOCK if index == 0 else f"{index}-{locks.ENGINE_LOCK}"
        self._lock = locks.FolderLock(self.settings.status_dir, name)
        self._lock.take()

    # What differs by device.

    #: Whether the real forward comes before the stock warmup, which captures graphs.
    real_warmup_first: bool = True

    def begin_measuring(self) -> None:
        """Called right before warmup."""
        raise NotImplementedError

    def read_memory(self, driver: MemoryDriver, committed_bytes: int) -> MemoryReading:
        """Called after warmup: what the device has left, and what the engine may take."""
        raise NotImplementedError

    def profiled_activation_bytes(self) -> int:
        """What the profile run needed beyond what stayed resident; 0 where there is none."""
        return 0

    def multimodal_ipc_bytes(self) -> int:
        """What a front end that decodes media on this device takes; kept out of the KV cache."""
        return 0

    def cap_allocator(self) -> None:
        """Called when the cache has the size that was measured: leave memory to what allocates beside torch."""

    def rebind(self, config: KVCacheConfig, views: dict[str, torch.Tensor]) -> None:
        """Put committed views where the model runner and its layers hold capacity views."""
        raise NotImplementedError

    def check_bandwidth(self, cache: GrowableKVCache, agent: Any) -> None:
        """Called once the connector's memory is registered: warn if peers would read it slowly."""

    # Reservation and warmup.

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Reserve the capacity, commit the warmup prefix, and let the stock worker allocate from that.

        Raises:
            OutOfMemoryError: not even the warmup prefix fits.
            SeamError: the stock worker did not take its memory from the reservation.
        """
        if self.fixed_because is not None:
            super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
            return
        started = time.monotonic()
        driver = self.open_driver()
        self.cache = GrowableKVCache(to_pdkv(kv_cache_config, interior_of(self.vllm_config, kv_cache_config)), driver)
        self.cache.commit(self._blocks_for_warmup(self.cache, kv_cache_config))
        self.warmup_blocks = self.cache.num_committed_blocks
        self._backing = ServeFromReservation(self.cache)
        super().initialize_from_config(with_placements(kv_cache_config, self.cache.config))  # type: ignore[misc]
        self._backing.require_served_once()
        self.times_s["reserve"] = time.monotonic() - started
        logger.info(
            "pdkv: reserved %d blocks (%.2f GiB of addresses), committed %d for warmup",
            self.cache.capacity_blocks, self.cache.bytes_reserved / 2**30, self.warmup_blocks,
        )  # fmt: skip

    def _blocks_for_warmup(self, cache: GrowableKVCache, kv_cache_config: KVCacheConfig) -> int:
        """The same on all ranks: a rank that warms up with fewer leaves the others waiting in a step."""
        if self.settings.warmup_blocks is not None:
            return self.agree_minimum(min(self.settings.warmup_blocks, cache.capacity_blocks))
        wanted = warmup.blocks_for_full_batch(
            self.scheduler_config.max_num_batched_tokens,
            self.model_config.max_model_len,
            kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
        )
        limit = committable_blocks(
            cache,
            free_memory=cache.driver.memory_info().free,
            activation_peak_bytes=self.profiled_activation_bytes(),
            limit_bytes=self.cache_config.kv_cache_memory_bytes or self._first_pass_bytes,
            constants=self.constants,
            agree_minimum=self.agree_minimum,
        )
        return max(2, min(wanted, limit))

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache" and self._backing is not None:
            return self._backing
        return super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc, no-any-return]

    def compile_or_warm_up_model(self) -> Any:
        """A real forward on the committed prefix, then whatever the stock worker does."""
        started = time.monotonic()
        self._warming_up = True
        try:
            if self.fixed_because is not None:
                return super().compile_or_warm_up_model()  # type: ignore[misc]
            self.begin_measuring()
            if self.real_warmup_first:
                self._run_warmup()
            times = super().compile_or_warm_up_model()  # type: ignore[misc]
            if not self.real_warmup_first:
                self._run_warmup()
            return times
        finally:
            self._warming_up = False
            self.times_s["warmup"] = time.monotonic() - started

    def _run_warmup(self) -> None:
        cache = self._require_cache()
        requests = warmup.plan_requests(
            cache.num_committed_blocks,
            self.model_runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
            self.scheduler_config.max_num_batched_tokens,
            self.model_config.max_model_len,
            self.scheduler_config.max_num_seqs,
        )
        metadata = get_kv_transfer_group().warmup_metadata() if has_kv_transfer_group() else None
        tokens = warmup.run_warmup(requests, self.execute_model, self.model_runner.sample_tokens, metadata)
        first = requests[0].block_ids[0]
        if not all(bool(view[first].any()) for view in cache.views().values()):
            raise SeamError(
                "warmup ran but wrote no KV into its blocks, so its memory use says nothing about a real step; this "
                "vLLM version needs a change in pdkv_connectors/vllm/warmup.py."
            )
        logger.info("pdkv: warmup wrote the KV of %d tokens into %d blocks", tokens, cache.num_committed_blocks)

    # Growth; called by the engine core on every rank.

    def pdkv_can_grow(self) -> bool:
        """Whether the cache is a growable one."""
        return self.fixed_because is None

    def pdkv_finish_fixed(self) -> None:
        """After the warmup of a fixed cache: build the late connector over it."""
        if has_kv_transfer_group():
            with set_current_vllm_config(self.vllm_config):
                get_kv_transfer_group().finish_fixed(report.status_file(self))
        self._extended = True
        report.write_fixed(self)

    def pdkv_propose_blocks(self) -> int:
        """How many blocks all ranks have room for, from what warmup really used."""
        cache = self._require_cache()
        self.reading = self.read_memory(cache.driver, cache.physical_bytes)
        final = decide_final_blocks(
            cache, reading=self.reading, explicit_bytes=self.cache_config.kv_cache_memory_bytes,
            constants=self.constants, agree_minimum=self.agree_minimum,
        )  # fmt: skip
        logger.info("pdkv: %s", final.message)
        return min(final.blocks, cache.capacity_blocks)

    def pdkv_extend(self, num_blocks: int) -> int:
        """Commit `num_blocks`, one chunk a segment, rebind, and only then build the connector. Returns the count."""
        cache = self._require_cache()
        if self._extended:
            raise StateError("the KV cache has been extended already; the engine's block count is fixed by then.")
        factory = self._late_connector_factory()
        extended = lifecycle.extend(cache, num_blocks, factory, rebind=self._rebind_committed)
        self._extended = True
        self.times_s.update(extended.times_s)
        if factory is not None and factory.connector.agent is not None:
            self.check_bandwidth(cache, factory.connector.agent)
        if self.cache_config.kv_cache_memory_bytes is None:
            self.cap_allocator()
        report.write_growable(self, cache, extended)
        return extended.blocks

    def _late_connector_factory(self) -> BuildLate | None:
        if not has_kv_transfer_group():
            return None
        from pdkv_connectors.vllm.facade import BuildLate

        return BuildLate(self, get_kv_transfer_group())

    def _rebind_committed(self, views: Mapping[str, torch.Tensor], config: kvcache.KVCacheConfig) -> None:
        """As `views`, but by vLLM's own functions, which know kernel blocks and shared layers."""
        cache = self._require_cache()
        self.committed_config = rebind.committed_config(self.model_runner, cache)
        self.committed_views = rebind.committed_views(self.model_runner, cache, self.committed_config)
        self.rebind(self.committed_config, self.committed_views)
        self.cache_config.num_gpu_blocks = config.num_blocks

    def execute_model(self, scheduler_output: Any) -> Any:
        """The stock step, refused while the cache is smaller than the engine believes."""
        if not (self._extended or self._warming_up):
            raise SeamError(
                "vLLM runs a step before the KV cache was extended: the wrap of EngineCore._initialize_kv_caches did "
                "not fire in the engine core process; is the pdkv plug-in loaded there (VLLM_PLUGINS)?"
            )
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def _require_cache(self) -> GrowableKVCache:
        if self.cache is None:
            raise StateError("the KV cache is not reserved yet; initialize_from_config comes first.")
        return self.cache
