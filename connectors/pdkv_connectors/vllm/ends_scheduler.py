"""The scheduler's half of pdkv's ends: turns what the engine does with a request into events for the workers.

Between two pdkv engines the stock books of leases, heartbeats and registrations stay empty: `pdkv.transfer` keeps them,
in the workers. A request without pdkv's reference comes from a stock prefill engine and takes the stock way.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.logger import init_logger

from pdkv.errors import ConnectorError, ProtocolError
from pdkv.transfer import BlockRun, Counters, FailCode, SystemClock
from pdkv.transfer.issued import IssuedReferences
from pdkv_connectors.vllm.ends_events import (
    ATTRIBUTE,
    Arrival,
    Events,
    Prefilled,
    RemoteKV,
    WorkerNews,
    read_remote_kv,
    reads_back,
    require_stock_kv,
)
from pdkv_connectors.vllm.ends_support import why_stock_only
from pdkv_connectors.vllm.handshake import KEY, RankInfo, read_stamp
from pdkv_connectors.vllm.refusals import MALFORMED, require_one_way

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(f"vllm.{__name__}")


class EndsScheduler:
    """Mixed in before a stock NIXL connector scheduler."""

    # From the stock scheduler.
    kv_cache_config: KVCacheConfig
    vllm_config: VllmConfig
    transfer_tp_size: int
    is_bidirectional_kv_xfer_enabled: bool
    _reqs_need_send: dict[str, float]
    _reqs_not_processed: set[str]
    _finished_request_blocks: dict[str, Any]  # push only
    _newly_finished_push_blocks: dict[str, Any]  # push only

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)  # type: ignore[call-arg]
        self.stock_only = why_stock_only(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._recompute = transfer is not None and transfer.kv_load_failure_policy == "recompute"
        self._handshakes: dict[tuple[int, int], Any] = {}
        self._ranks: tuple[RankInfo, ...] = ()
        self._events = Events()
        self._names: dict[str, str] = {}  # P: request id -> its name between P and D
        self._held: dict[str, str] = {}  # P: the same, of requests that have finished and whose blocks D may read
        self._serial = itertools.count(1)
        self._references = IssuedReferences(SystemClock(), Counters())
        self._remote: set[str] = set()  # D: requests whose KV comes by pdkv's protocol
        self._refused: set[str] = set()  # requests that were refused by what they say of their KV
        self._role = "" if transfer is None else str(transfer.kv_role)
        self._holds = transfer is not None and "pdkv_hold_s" in (transfer.kv_connector_extra_config or {})
        self._preemptions: dict[str, int] = {}  # D: of a request, as many as the workers were asked about
        self._asking: set[str] = set()  # D: preempted requests of which the workers have yet to say
        self._again: dict[str, bool] = {}  # ... whether their KV can be read again
        self._failed: dict[str, str] = {}  # D: of these, such whose KV will not come, and why

    # Requests.

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        try:
            remote = self._remote_kv(params)
        except ConnectorError as error:
            self._refuse(request, MALFORMED if isinstance(error, ProtocolError) else FailCode.INCOMPATIBLE, str(error))
            return
        if remote is not None:
            # One that was refused before it was a request is made of one token only to be aborted.
            num_tokens = remote.num_tokens if request.abort_immediately else request.num_prompt_tokens
            self._remote.add(request.request_id)
            self._events.arrived.append(Arrival(request.request_id, num_tokens, remote))
            return  # the stock half would begin to send heartbeats
        if self._ranks and params.get("do_remote_decode"):
            self._names[request.request_id] = f"{request.request_id[:200]}#{next(self._serial)}"
        super().on_new_request(request)  # type: ignore[misc]

    def _remote_kv(self, params: dict[str, Any]) -> RemoteKV | None:
        """Where the KV of a request is by pdkv's protocol; None where it takes the stock way, or none is to come.

        The stock way has no other check: neither vLLM's scheduler nor its workers look at what they were given. So
        this is for every engine, also for one that speaks nothing but stock.

        Raises:
            ConnectorError: it cannot be had, by what the request says.
        """
        require_one_way(params, self._role)
        is_pull = not hasattr(self, "_finished_request_blocks")  # what push has books of
        if is_pull and reads_back(params):
            if not self.is_bidirectional_kv_xfer_enabled:
                raise ProtocolError(
                    "remote_block_ids name blocks to load before the prompt is computed, and this engine runs without "
                    "bidirectional_kv_xfer; leave them out."
                )
            require_stock_kv({"tp_size": 1, **params}, with_blocks=True)
        if not params.get("do_remote_prefill"):
            return None
        remote = read_remote_kv(params)
        if remote is None or self.stock_only is not None or self._has_other_ranks(remote):
            require_stock_kv(params, with_blocks=is_pull)
            return None
        return remote

    def _has_other_ranks(self, remote: RemoteKV) -> bool:
        if len(remote.ranks) == self.transfer_tp_size:
            return False
        logger.warning_once(
            "pdkv: prefill has %d ranks and decode %d; their requests take the stock protocol, whose failures are "
            "noticed later.", len(remote.ranks), self.transfer_tp_size,
        )  # fmt: skip
        return True

    def _refuse(self, request: Any, code: str, reason: str) -> None:
        """Nobody is asked for its KV; to vLLM it is a request whose KV was to come, and does not."""
        request_id = request.request_id
        logger.warning("pdkv: the KV of request %s will not come (%s): %s", request_id, code, reason)
        request.kv_transfer_params.update(do_remote_prefill=True, do_remote_decode=False)
        self._refused.add(request_id)
        self._events.refused.add(request_id)
        self.will_not_come(request_id, code, reason)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._recompute and (request.request_id in self._failed or request.request_id in self._refused):
            return 0, False  # it failed in the queue: computed here, without waiting for blocks to load into
        if request.request_id in self._remote and request.num_preemptions > 0 and not self._can_go_on(request):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[misc, no-any-return]

    def _can_go_on(self, request: Any) -> bool:
        """Whether it is known what becomes of a preempted request: read again while prefill keeps its KV, or computed.

        The workers know; where prefill is told to keep nothing that has arrived, it is computed without waiting for
        their answer. Either is counted.
        """
        request_id, params = request.request_id, request.kv_transfer_params
        if self._preemptions.get(request_id, 0) < request.num_preemptions:
            self._preemptions[request_id] = request.num_preemptions
            self._events.preempted.append(request_id)
            if self._holds:
                self._asking.add(request_id)
        if request_id not in self._asking:
            return True
        if request_id not in self._again:
            return False
        self._asking.discard(request_id)
        params["do_remote_prefill"] = self._again.pop(request_id)
        if not params["do_remote_prefill"]:
            self._events.gone[request_id] = "preempted, and the lease of one rank has ended"
        return True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if request.request_id in self._refused:
            if params.get("do_remote_prefill") and num_external_tokens > 0:
                # With several ranks vLLM hears of a failure only together with the end of a load.
                self._events.refused.add(request.request_id)
                self._events.untouched.add(request.request_id)
            params["do_remote_prefill"] = False
        elif (name := self._names.get(request.request_id)) is not None:
            self._events.expected.append(name)
        elif request.request_id in self._remote:
            if params.get("do_remote_prefill"):
                runs = self._runs_to_load(blocks) if num_external_tokens > 0 else ()
                self._events.allocated[request.request_id] = runs
                params["do_remote_prefill"] = False
        else:
            super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        if request_id in self._refused:
            self._refused.discard(request_id)
            self._events.refused.discard(request_id)
            request.kv_transfer_params["do_remote_prefill"] = False
            return False, None
        if request_id in self._remote:
            self._remote.discard(request_id)
            self._asking.discard(request_id)
            for book in (self._failed, self._preemptions, self._again):
                book.pop(request_id, None)
            self._events.gone[request_id] = f"the request is over on decode ({request.status.name.lower()})"
            (request.kv_transfer_params or {})["do_remote_prefill"] = False
            return False, None
        name = self._names.pop(request_id, None)
        held, params = super().request_finished(request, block_ids)  # type: ignore[misc]
        if name is None:
            return held, params
        self._reqs_need_send.pop(request_id, None)
        self._reqs_not_processed.discard(request_id)
        for book in ("_finished_request_blocks", "_newly_finished_push_blocks"):
            getattr(self, book, {}).pop(request_id, None)
        if params is None:
            self._events.aborted[name] = f"the request is over on prefill ({request.status.name.lower()})"
            return held, params
        if held:
            self._held[request_id] = name
        runs = self._runs_to_give(block_ids) if held else ()
        references = tuple(
            self._references.issue(rank.ref, name, request.num_prompt_tokens, runs) for rank in self._ranks
        )
        self._events.prefilled.append(Prefilled(request_id, references))
        params[KEY] = msgspec.to_builtins(RemoteKV.of(references, self._ranks))
        return held, params

    def give_up_finished(self, request_id: str, reason: str) -> None:
        """P: nobody is to have the KV of this finished prompt any more; a D that has asked is told. Idempotent."""
        if (name := self._held.pop(request_id, None)) is not None:
            self._events.aborted[name] = reason

    # Blocks, by their index in the prompt.

    def _runs_to_give(self, block_ids: Sequence[Sequence[int]]) -> tuple[BlockRun, ...]:
        """P's blocks: all, or the tail that a sliding window still sees."""
        whole = self.kv_cache_config.select_transfer_block_ids(block_ids)
        kept = self.get_exchange_clipped_blocks(block_ids)  # type: ignore[attr-defined]
        return tuple(_without_null(len(all_ids) - len(ids), ids) for all_ids, ids in zip(whole, kept, strict=True))

    def _runs_to_load(self, blocks: Any) -> tuple[BlockRun, ...]:
        """D's blocks that are not in its prefix cache."""
        whole = self.kv_cache_config.select_transfer_block_ids(blocks.get_block_ids())
        kept = self.get_exchange_clipped_blocks(blocks.get_unhashed_block_ids_all_groups())  # type: ignore[attr-defined]
        return tuple(BlockRun(len(all_ids) - len(ids), tuple(ids)) for all_ids, ids in zip(whole, kept, strict=True))

    # To and from the workers.

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        metadata = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        setattr(metadata, ATTRIBUTE, self._events)
        self._events = Events()
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)  # type: ignore[misc]
        for request_id in connector_output.finished_sending or ():
            self._held.pop(request_id, None)
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, WorkerNews):
            self._failed.update((key, reason) for key, reason in news.failed.items() if key in self._remote)
            for key, failure in news.failed.items():
                code, _, reason = failure.partition(": ")
                self.will_not_come(key, code, reason)
            self._again.update((key, again) for key, again in news.again.items() if key in self._asking)
            if news.handshakes:
                self.set_xfer_handshake_metadata({**self._handshakes, **news.handshakes})

    def will_not_come(self, request_id: str, code: str, reason: str) -> None:
        """For who publishes it: `waiting.PublishingScheduler`."""

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._handshakes = dict(metadata)
        stamps = [read_stamp(payload) for _, payload in sorted(metadata.items())]
        self._ranks = tuple(stamp for stamp in stamps if stamp is not None and stamp.control)
        super().set_xfer_handshake_metadata(metadata)  # type: ignore[misc]


def _without_null(first: int, ids: Sequence[int]) -> BlockRun:
    """A run without the null blocks (0) that stand for what a window has left behind; they are at its start."""
    skipped = next((place for place, block_id in enumerate(ids) if block_id != 0), len(ids))
    return BlockRun(first + skipped, tuple(ids[skipped:]))
