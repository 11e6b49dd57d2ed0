"""A connector's two halves without a model: what vLLM's scheduler and workers would do to them, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

import pdkv
from pdkv.transfer.base import PostedTransfer
from pdkv.transfer.inproc import InprocTransport
from pdkv.transfer.transport import TransferState, Transport
from pdkv_connectors.vllm.session_orders import StepReports
from pdkv_connectors.vllm.session_scheduler import SessionScheduler
from pdkv_connectors.vllm.session_worker import SessionWorker

BLOCK = 16
DEADLINE_S = 60.0
HEADS = 2  # of each rank, unless told otherwise


def config_of(role: str, policy: str = "fail", **extra: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role=role, kv_connector_extra_config=extra, kv_load_failure_policy=policy
        ),
        parallel_config=SimpleNamespace(data_parallel_index=0),
        model_config=SimpleNamespace(model="m", dtype="float32"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def cache_config(block_size: int) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=block_size))])


@dataclass
class Request:
    """As much of vLLM's as the connector looks at."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any]
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    abort_immediately: bool = False


@dataclass
class Blocks:
    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.ids,)


class Stuck(InprocTransport):
    """Its first transfers never end."""

    endless = 0

    def _do_post(self, *args: Any, **options: Any) -> PostedTransfer:
        if Stuck.endless > 0:
            Stuck.endless -= 1
            return Endless(self, args[0], 0)
        return super()._do_post(*args, **options)


class Endless(PostedTransfer):
    def _look(self) -> TransferState:
        return TransferState.RUNNING


@dataclass
class Engine:
    """A connector's two halves and the steps that vLLM would make."""

    scheduler: SessionScheduler
    workers: list[SessionWorker]
    caches: list[pdkv.GrowableKVCache]
    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        config: Any,
        *,
        num_blocks: int = 24,
        ranks: int = 1,
        make_transport: Callable[[], Transport] = InprocTransport,
        heads: int = HEADS,
        block_size: int = BLOCK,
        layout: str = "LBNHC",
    ) -> Engine:
        """`heads`: of each rank."""
        caches, workers = [], []
        for rank in range(ranks):
            spec = pdkv.AttentionSpec(num_kv_heads=heads, block_size=block_size, head_size=8, dtype="float32")
            layers = pdkv.KVCacheConfig.uniform(["a", "b"], spec, num_blocks, pdkv.KVCacheLayout[layout])
            cache = pdkv.GrowableKVCache(layers, pdkv.open_driver("host", granule=65536))
            cache.commit(num_blocks, defragment=True)
            worker = SessionWorker(
                make_transport,
                f"{config.kv_transfer_config.kv_role}/{id(cache)}",
                rank,
                shape=f"{layout}, {heads} heads of {block_size} tokens",
                num_kv_heads=heads * ranks,
                num_ranks=ranks,
            )
            worker.register(cache)
            caches.append(cache)
            workers.append(worker)
        engine = cls(SessionScheduler(config, "engine", cache_config(block_size)), workers, caches)
        engine.publish()
        return engine

    def publish(self) -> None:
        self.scheduler.set_registrations({rank: worker.registration for rank, worker in enumerate(self.workers)})

    def step(self) -> None:
        meta = self.scheduler.build_connector_meta(SchedulerOutput.make_empty())
        reports: StepReports | None = None
        for worker in self.workers:
            worker.work_off(meta.orders)
            of_rank = worker.collect()
            reports = of_rank if reports is None else reports.aggregate(of_rank) if of_rank else reports
        self.sent += meta.sent
        self.received += meta.received
        self.failed += meta.failed
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=reports))

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.unregister()
        for cache in self.caches:
            cache.close()


class PD:
    """Prefill and decode, stepped in turn."""

    def __init__(
        self,
        *,
        policy: str = "fail",
        ranks: int = 1,
        decode: dict[str, Any] | None = None,
        here: dict[str, Any] | None = None,
        **there: Any,
    ) -> None:
        """`there`, `here`: of :meth:`Engine.start`, for prefill and decode."""
        self.prefill = Engine.start(config_of("kv_producer"), **{"num_blocks": 40, "ranks": ranks, **there})
        channel = self.prefill.scheduler.channel
        assert channel is not None
        extra = {"pdkv_side_channel_peers": str(channel.address), **(decode or {})}
        options = {"ranks": ranks, "make_transport": Stuck, **(here or {})}
        self.decode = Engine.start(config_of("kv_consumer", policy, **extra), **options)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, (self.prefill, self.decode)
            self.prefill.step()
            self.decode.step()

    def offer(self, request_id: str, blocks: list[int], num_tokens: int) -> dict[str, Any]:
        for rank, cache in enumerate(self.prefill.caches):
            for view in cache.views().values():
                for block in blocks:
                    view[block] = torch.rand(view[block].shape) + rank
        request = Request(
            request_id, num_tokens, {"do_remote_decode": True}, status=RequestStatus.FINISHED_LENGTH_CAPPED
        )
        held, params = self.prefill.scheduler.request_finished(request, (blocks,))
        assert held
        assert params is not None
        return params

    def load(self, request: Request, blocks: list[int], cached_tokens: int = 0) -> None:
        """What vLLM's scheduler does with a request that has come out of its queue."""
        decode = self.decode.scheduler
        count, is_async = decode.get_num_new_matched_tokens(request, cached_tokens)
        assert is_async == (count > 0)
        decode.update_state_after_alloc(request, Blocks(blocks), count)

    def contents(self, side: Engine, blocks: list[int], rank: int = 0) -> torch.Tensor:
        return torch.stack([view[block] for view in side.caches[rank].views().values() for block in blocks])

    def same(self, theirs: list[int], ours: list[int], rank: int = 0) -> bool:
        return torch.equal(self.contents(self.decode, ours, rank), self.contents(self.prefill, theirs, rank))

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


def arrive(pd: PD, request_id: str, params: dict[str, Any], num_tokens: int) -> Request:
    request = Request(request_id, num_tokens, params)
    pd.decode.scheduler.on_new_request(request)
    return request
