"""Commands of `engine_main.Engine` that are about sleep, wake and weight updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class SleepCommands:
    """Mixed into the engine, which has the `LLM` and what is below it."""

    llm: Any
    core: Any
    worker: Any

    def do_sleep(self, level: int = 1, mode: str = "abort") -> Any:
        """Put the engine to sleep; the error's text where it refuses."""
        return error_of(lambda: self.llm.sleep(level=level, mode=mode))

    def do_wake(self, tags: list[str] | None = None) -> Any:
        """Wake the engine; the error's text where it fails."""
        return error_of(lambda: self.llm.wake_up(tags))

    def do_release_kv_cache(self) -> Any:
        """vLLM's release of the cache alone, after a pause; the error's text where it refuses."""

        def release() -> None:
            self.core.pause_scheduler()
            self.core.release_kv_cache_memory()

        return error_of(release)

    def do_reload_weights(self, path: str | None = None) -> Any:
        """Load the weights again; the error's text where it fails."""
        return error_of(lambda: self.core.collective_rpc("reload_weights", kwargs={"weights_path": path}))

    def do_step_worker(self) -> Any:
        """Have the worker execute a step past the scheduler; the error's text where it refuses."""
        from vllm.v1.core.sched.output import SchedulerOutput

        return error_of(lambda: self.worker.execute_model(SchedulerOutput.make_empty()))

    def do_check_connector(self, rule: str, folder: str, reads: bool) -> Any:
        """Hold this engine's connector to one rule of the conformance suite; what is broken, or None.

        The engine is idle meanwhile, and has its connector registered and its cache zeroed afterwards.
        """
        from nixl_bench import NixlBench
        from nixl_peer import NixlPeer
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from pdkv.testing import BrokenRuleError, run_connector_check
        from pdkv_connectors.vllm.sleep_engine import gate_of

        cache, connector = self.worker.cache, get_kv_transfer_group()
        blocks = cache.num_committed_blocks

        def undo() -> None:
            if cache.is_released:
                cache.recommit()
            cache.commit(blocks, defragment=True)
            connector.register_kv_cache(cache)
            gate_of(self.core).publish()
            self.core.reset_prefix_cache()  # what it remembers was in memory that has been replaced

        connector.unregister_kv_cache()
        with NixlPeer("peer", Path(folder)) as peer:
            bench = NixlBench(
                cache,
                connector,
                lambda: connector.connector_worker and connector.connector_worker.nixl_wrapper,
                lambda: connector.registered_ranges,
                peer,
                reads=reads,
                undo=undo,
            )
            try:
                run_connector_check(rule, lambda: bench)
            except BrokenRuleError as error:
                return str(error)
        return None

    def do_held(self) -> Any:
        """Requests whose blocks peers may read or write."""
        from pdkv_connectors.vllm.sleep_engine import gate_of

        return list(gate_of(self.core).holders())

    def do_sleeping(self) -> Any:
        """What the engine, the cache and the connector say of sleep."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        worker, core = self.worker, self.core
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        stock = None if connector is None else connector.connector_worker
        return {
            "state": str(worker.kv_state),
            "is_sleeping": bool(core.is_sleeping()),
            "tags": sorted(core.model_executor.sleeping_tags),
            "generation": None if connector is None else connector.generation,
            "agent": None if stock is None else stock.nixl_wrapper.name,
            "physical_bytes": worker.cache.physical_bytes,
            "cached_blocks": len(core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block),
        }

    def do_sleep_times(self) -> Any:
        """Seconds by step of the last sleep and the last wake."""
        facts = self.worker.sleep_facts
        return {name: facts[name] for name in ("sleep_times_s", "wake_times_s") if name in facts}


def error_of(call: Any) -> str | None:
    """The text of what a call raises; None where it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
