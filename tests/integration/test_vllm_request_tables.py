"""What the scheduler's half of the NIXL connectors remembers of a request ends with it, whatever becomes of it.

vLLM's own scheduler, with blocks too few for all, walks at random; only the workers behind it are played here, by what
they are told and may answer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from engine import free_port
from random_llama import make_random_llama

from pdkv_connectors.vllm import patches
from pdkv_connectors.vllm.ends_events import Events, WorkerNews, events_of
from pdkv_connectors.vllm.handshake import RankInfo, stamp

pytestmark = pytest.mark.vllm

BLOCK = 16
NUM_BLOCKS = 14
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
STOCK = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 9,
    "remote_block_ids": [[1, 2, 3, 4, 5, 6]],
    "tp_size": 1,
}
#: Of `EndsScheduler`, by request id.
TABLES = ("_names", "_held", "_remote", "_refused", "_preemptions", "_asking", "_again", "_failed")
#: Of vLLM's own.
STOCK_TABLES = ("_reqs_need_recv", "_reqs_need_send", "_heartbeat_req_engine", "_heartbeat_by_engine")


class Workers:
    """What one rank does with a step's metadata, at its own pace: `luck` decides when, and whether a load fails."""

    def __init__(self, luck: random.Random) -> None:
        self.luck = luck
        self.sending: list[str] = []
        self.named: dict[str, str] = {}
        self.loading: list[str] = []
        self.failing: set[str] = set()
        self.known: set[str] = set()

    def step(self, metadata: Any) -> dict[str, Any]:
        """The fields of a `KVConnectorOutput`."""
        events = events_of(metadata)
        assert events is not None
        news = WorkerNews()
        self._prefill(events)
        self._decode(events, news)
        self.loading += [key for key, meta in metadata.reqs_to_recv.items() if any(meta.local_block_ids)]
        self.sending += list(metadata.reqs_to_send)
        sent, received = self._some(self.sending), self._some(self.loading)
        failed = (set(received) | set(news.failed)) & self.failing
        return {
            "finished_sending": set(sent),
            "finished_recving": set(received) | events.untouched,
            "failed_recving": failed | events.refused,
            "kv_connector_worker_meta": news,
        }

    def _prefill(self, events: Events) -> None:
        for done in events.prefilled:
            if any(run.block_ids for run in done.references[0].blocks):
                self.named[done.name] = done.request_id
                self.sending.append(done.request_id)
        for name in events.aborted:
            self.named.pop(name, None)

    def _decode(self, events: Events, news: WorkerNews) -> None:
        for arrival in events.arrived:
            self.known.add(arrival.request_id)
            if self.luck.random() < 0.2:
                self.failing.add(arrival.request_id)
                news.failed[arrival.request_id] = "expired: too late"
        for request_id, runs in events.allocated.items():
            if any(run.block_ids for run in runs):
                self.loading.append(request_id)
        for request_id in events.preempted:
            news.again[request_id] = self.luck.random() < 0.5
        self.known -= set(events.gone)

    def _some(self, ids: list[str]) -> list[str]:
        found = [request_id for request_id in dict.fromkeys(ids) if self.luck.random() < 0.4]
        for request_id in found:
            ids.remove(request_id)
        return found


class Walk:
    """One scheduler with a connector of both roles, and requests of every kind."""

    def __init__(self, model: Path, mode: str, policy: str, seed: int) -> None:
        self.luck = random.Random(seed)
        self.scheduler = make_scheduler(model, mode, policy)
        self.ends = self.scheduler.connector.connector_scheduler
        payload = _payload()
        if self.ends.stock_only is None:
            payload = stamp(payload, RankInfo(engine_id=f"p{seed}", generation=1, control="tcp://127.0.0.1:9"))
        self.ends.set_xfer_handshake_metadata({(0, 0): payload})
        self.workers = Workers(self.luck)
        self.handed_over: list[dict[str, Any]] = []
        self.seen: set[str] = set()
        self.count = 0
        self.preemptions = 0

    def kinds(self) -> dict[str, Any]:
        """Parameters of a request; each a new dict, since vLLM changes them."""
        good = dict(self.luck.choice(self.handed_over)) if self.handed_over else dict(STOCK)
        return {
            "none": None,
            "prefill": dict(ASK),
            "prefill again": dict(ASK),
            "decode": good,
            "both, of pdkv": {**good, "do_remote_decode": True},
            "stock": dict(STOCK),
            "both, of stock": {**STOCK, "do_remote_decode": True},
            "malformed": {"do_remote_prefill": True, "pdkv": {"engine": 1}},
            "both, malformed": {"do_remote_prefill": True, "do_remote_decode": True},
            "to read back": {**STOCK, **ASK, "remote_num_tokens": 60},
        }

    def add(self) -> None:
        kinds = self.kinds()
        kind = self.luck.choice(list(kinds))
        self.seen.add(kind)
        self.count += 1
        prefills = kinds[kind] == ASK
        request = make_request(
            f"{self.count}", self.luck.randrange(1, 90), 1 if prefills else self.luck.randrange(1, 60), kinds[kind]
        )
        self.scheduler.add_request(request)
        if self.luck.random() < 0.1:  # as the front end gives one up before it is scheduled
            self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        if request_id in self.scheduler.requests and self.scheduler.requests[request_id].is_finished():
            self.ends.give_up_finished(request_id, "its client had left")
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        done = self.workers.step(output.kv_connector_metadata)
        ids = list(output.num_scheduled_tokens)
        tokens = [[7] if self._is_sampled(request_id) else [] for request_id in ids]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            kv_connector_output=KVConnectorOutput(**done),
        )
        self.preemptions += len(output.preempted_req_ids or ())
        for outputs in self.scheduler.update_from_output(output, result).values():
            self.handed_over += [one.kv_transfer_params for one in outputs.outputs if one.kv_transfer_params]

    def _is_sampled(self, request_id: str) -> bool:
        request = self.scheduler.requests[request_id]
        return bool(request.num_computed_tokens >= request.num_tokens)

    def to_the_end(self) -> None:
        for _ in range(3000):
            if not self.scheduler.requests:
                return
            self.step()
        raise AssertionError(f"requests that do not end: {self.scheduler.requests}")


def _payload() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

    return NixlHandshakePayload("hash", msgspec.msgpack.encode({}))


def make_request(request_id: str, length: int, max_tokens: int, params: Any) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    extra = None if params is None else {"kv_transfer_params": params}
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
    return Request(request_id, [5] * length, sampling, None)


def make_scheduler(model: Path, mode: str, policy: str) -> Any:
    """vLLM's, as its engine makes it."""
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    patches.install()
    model_config = ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=256)
    cache_config = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
    cache_config.num_gpu_blocks = NUM_BLOCKS
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=128, max_model_len=256, is_encoder_decoder=False
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="PdkvNixlPushConnector" if mode == "Push" else "PdkvNixlPullConnector",
            kv_connector_module_path="pdkv_connectors.vllm.nixl",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"pdkv_hold_s": 5, "bidirectional_kv_xfer": mode == "Stock"},
        ),
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
    kv_cache = KVCacheConfig(
        num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
    )
    return Scheduler(config, kv_cache, StructuredOutputManager(config), BLOCK)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("tiny"), "tiny")


@pytest.fixture
def walk(request: pytest.FixtureRequest, llama: Path) -> Iterator[Walk]:
    # vLLM writes what its platform needs into the environment, which the engines of later tests would begin with.
    with mock.patch.dict(os.environ, VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port())):
        made = Walk(llama, *request.param)
        yield made
        made.scheduler.shutdown()


#: "Stock": pull, and an engine that speaks the stock protocol only, as hybrids do.
MODES = ("Pull", "Push", "Stock")
WALKS = [(mode, policy, seed) for mode in MODES for policy in ("fail", "recompute") for seed in range(3)]


@pytest.mark.parametrize("walk", WALKS, indirect=True, ids=lambda case: "-".join(map(str, case)))
def test_the_tables_of_requests_are_empty_when_all_have_ended(walk: Walk) -> None:
    for _ in range(600):
        if walk.luck.random() < 0.4 and len(walk.scheduler.requests) < 12:
            walk.add()
        if walk.luck.random() < 0.1 and walk.scheduler.requests:
            walk.abort(walk.luck.choice(list(walk.scheduler.requests)))
        walk.step()
    walk.to_the_end()
    walk.step()
    assert walk.seen == set(walk.kinds())
    assert walk.preemptions > 0
    left = {name: table for name in TABLES + STOCK_TABLES if (table := getattr(walk.ends, name, None))}
    assert left == {}
    assert not walk.workers.known
    pool = walk.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1
