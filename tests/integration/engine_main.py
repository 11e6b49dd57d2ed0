"""A real vLLM engine in this process, driven by JSON lines. Started by `engine.EngineProcess`, never imported.

Between commands the engine keeps stepping, as a server's engine core would, so that it serves the peers that read from
it.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any

from engine_sleep import SleepCommands

from pdkv.testing.child import serve

IDLE_INTERVAL_S = 0.005


def main() -> None:
    engine = Engine()
    step = engine.step_if_needed
    serve(engine, int(sys.argv[1]), step, IDLE_INTERVAL_S, before_each=step)


def count_graphs(counts: dict[str, int]) -> None:
    """Count captures and replays of CUDA graphs in this process from now on."""
    import torch

    if not torch.cuda.is_available():
        return
    graph = torch.cuda.CUDAGraph
    begin, replay = graph.capture_begin, graph.replay

    def counted_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["captures"] += 1
        return begin(self, *args, **kwargs)

    def counted_replay(self: Any) -> Any:
        counts["replays"] += 1
        return replay(self)

    graph.capture_begin, graph.replay = counted_begin, counted_replay


def _refuse(handle: Any) -> Any:
    raise RuntimeError("no transfer is taken, for a test")


class Engine(SleepCommands):
    """One `LLM`; each `do_` method is a command."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.finished: dict[str, dict[str, Any]] = {}
        self.graphs = {"captures": 0, "replays": 0}
        self.affinity_before = sorted(os.sched_getaffinity(0))

    def do_start(self, options: dict[str, Any]) -> Any:
        """Start vLLM with these options; the log tells where it raised."""
        from vllm import LLM

        count_graphs(self.graphs)
        try:
            self.llm = LLM(**options)
        except Exception:
            traceback.print_exc()
            raise

    def step_if_needed(self) -> None:
        """One step where the scheduler has requests."""
        if self.llm is not None and self.core.scheduler.has_requests():
            self.step()

    def step(self) -> None:
        """One step of the engine; keeps what becomes of requests that were submitted."""
        for output in self.llm.llm_engine.step():
            if output.finished:
                first = output.outputs[0]
                self.finished[output.request_id] = {
                    "tokens": list(first.token_ids),
                    "reason": first.finish_reason,
                    "transfer": output.kv_transfer_params,
                }

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def worker(self) -> Any:
        return self.core.model_executor.driver_worker.worker

    def do_generate(
        self, prompts: list[list[int]], max_tokens: int, transfer: list[Any] | None = None, first_id: int | None = None
    ) -> Any:
        """Greedy tokens for each prompt of token ids; `transfer` are kv_transfer_params, one a prompt.

        Requests are numbered from `first_id`. Push finds the two halves of a request by its id, which a proxy would
        have given to both.
        """
        from vllm import SamplingParams

        if first_id is not None:
            self.llm.request_counter.counter = first_id
        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                extra_args={"kv_transfer_params": transfer[index]} if transfer else None,
            )
            for index in range(len(prompts))
        ]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "transfer": output.kv_transfer_params,
                "finish": output.outputs[0].finish_reason,
            }
            for output in outputs
        ]

    def do_submit(
        self, request_id: str, prompt: list[int], max_tokens: int, transfer: Any = None, steps: int | None = None
    ) -> Any:
        """Begin one request; its outcome is asked for later. The engine steps between commands.

        Args:
            steps: so many steps after it the client is gone; 0: before the request was scheduled, as when the front
                end refuses it.
        """
        from vllm import SamplingParams

        extra = None if transfer is None else {"kv_transfer_params": transfer}
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra)
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        if steps is not None:
            for _ in range(steps):
                self.step()
            self.do_abort(request_id)

    def do_hold_transfers(self, held: bool) -> Any:
        """While `held`, no transfer that this engine has posted is seen to end."""
        from pdkv_connectors.vllm.block_transfers import BlockTransfers

        if not hasattr(self, "poll"):
            self.poll = BlockTransfers.poll
        BlockTransfers.poll = (lambda _: []) if held else self.poll  # type: ignore[method-assign]

    def do_refuse_posts(self, refused: bool) -> Any:
        """While `refused`, NIXL takes no transfer of this engine."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        agent = get_kv_transfer_group().agent
        if refused:
            agent.transfer = _refuse
        else:
            del agent.transfer

    def do_zero_received(self, on: bool) -> Any:
        """The negative control of `PdkvConnector` on all ranks: while `on`, KV that has arrived is zeroed."""
        self.core.collective_rpc(_zero_received, args=(on,))

    def do_abort(self, request_id: str) -> Any:
        """As when the client of a request is gone."""
        self.llm.llm_engine.abort_request([request_id])

    def do_abort_in_core(self, request_id: str) -> Any:
        """As when a client is gone, and the request's end is on its way to the front end."""
        self.core.abort_requests([request_id])

    def do_outcome(self, request_id: str, within_s: float) -> Any:
        """Step until a submitted request has ended; None where it has not by then."""
        deadline = time.monotonic() + within_s
        while request_id not in self.finished and time.monotonic() < deadline:
            self.step()
        return self.finished.pop(request_id, None)

    def do_ends(self) -> Any:
        """What the connector's ends count and hold."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().ends.snapshot()

    def do_until(self, path: list[str], value: Any, within_s: float) -> Any:
        """Step while there is something to do, until one value of the ends is as wanted; all of them as found.

        ``["free_blocks"]`` is the pool's: the scheduler hears of it one step later.
        """
        deadline = time.monotonic() + within_s
        while True:
            pool = self.core.scheduler.kv_cache_manager.block_pool
            ends = found = {**self.do_ends(), "free_blocks": pool.get_num_free_blocks()}
            for name in path:
                found = found.get(name, 0)
            if found == value or time.monotonic() > deadline:
                return {"found": found, "ends": ends}
            if self.core.scheduler.has_requests():
                self.step()
            else:
                time.sleep(0.002)

    def do_free_blocks(self, within_s: float) -> Any:
        """Step until vLLM's scheduler knows no request any more; free blocks of its pool then, and whether it is so."""
        deadline, scheduler = time.monotonic() + within_s, self.core.scheduler
        while scheduler.requests and time.monotonic() < deadline:
            self.step()
        return {"free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), "left": list(scheduler.requests)}

    def do_unfinished(self) -> Any:
        """How many requests have not ended."""
        return sum(not request.is_finished() for request in self.core.scheduler.requests.values())

    def do_memory(self) -> Any:
        """Resident bytes of this process, shared memory included, as the kernel counts them."""
        import psutil

        return psutil.Process().memory_info().rss

    def do_graphs(self) -> Any:
        """How many CUDA graphs were captured and how many replayed since the process began."""
        return self.graphs

    def do_pool_blocks(self) -> Any:
        """Blocks of the scheduler's pool; also of an engine whose workers are other processes."""
        return self.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks

    def do_facts(self) -> Any:
        """What the engine, its cache and its connector say of themselves, and what the kernel says."""
        worker, core = self.worker, self.core
        cache = getattr(worker, "cache", None)
        connector = core.scheduler.connector
        facts: dict[str, Any] = {
            "worker_class": type(worker).__name__,
            "pool_blocks": core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            "configured_blocks": core.vllm_config.cache_config.num_gpu_blocks,
            "affinity": [self.affinity_before, sorted(os.sched_getaffinity(0))],
            "wrapped": getattr(type(core)._initialize_kv_caches, "__pdkv_wrapped__", False),
        }
        if cache is not None:
            facts["cache"] = cache.describe()
            facts["warmup_blocks"] = worker.warmup_blocks
            facts["times_s"] = worker.times_s
            facts["segments"] = [[s.offset, s.nbytes, s.block_stride] for s in cache.segments]
            facts["extents"] = [[e.address, e.nbytes] for e in cache.extents()]
            bound = {id(view): view for view in worker.model_runner.kv_caches}
            facts["view_blocks"] = sorted({int(view.shape[0]) for view in bound.values()})
            facts["storage_bytes"] = sorted({int(view.untyped_storage().nbytes()) for view in bound.values()})
            facts["storage_start"] = [int(view.untyped_storage().data_ptr()) for view in bound.values()]
        if connector is not None and hasattr(connector.connector_scheduler, "accounts"):
            counts = connector.connector_scheduler.accounts.counts
            facts["counts"] = {name: getattr(counts, name) for name in counts.__dataclass_fields__}
        session = getattr(getattr(connector, "connector_scheduler", None), "session", None)
        if session is not None:
            facts["metrics"] = session.metrics()
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if has_kv_transfer_group():
            facts["registered"] = [list(entry) for entry in get_kv_transfer_group().registered_ranges]
        return facts


def _zero_received(worker: Any, on: bool) -> None:
    """In each rank's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().connector_worker._zero = on


if __name__ == "__main__":
    main()
