"""The seam "warm up": a real forward that writes KV into the committed prefix.

vLLM's own dummy runs set the slot mapping to -1 and write no KV, and on the CPU an engine with explicit KV bytes does
no warmup at all. So the steps are built by hand, as the scheduler would build them: one prefill of as many tokens as a
full batch holds, one decode step, and one step that ends the requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from pdkv.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


#: Tokens that each request samples: one after the prefill, one after the decode step. vLLM refuses a request that
#: would sample beyond `max_model_len`.
_SAMPLED = 2


@dataclass(frozen=True, slots=True)
class WarmupRequest:
    """One request of the warmup: `num_tokens` prompt tokens in blocks `block_ids`, which have room for one more."""

    req_id: str
    num_tokens: int
    block_ids: tuple[int, ...]


def blocks_for_full_batch(max_num_batched_tokens: int, max_model_len: int, block_size: int) -> int:
    """Blocks that a prefill of a full batch needs, block 0 (never used) and one decoded token a request included."""
    requests = -(-max_num_batched_tokens // max(1, max_model_len - _SAMPLED))
    return 1 + -(-max_num_batched_tokens // block_size) + 2 * requests


def plan_requests(
    num_blocks: int, block_size: int, max_num_batched_tokens: int, max_model_len: int, max_num_seqs: int
) -> tuple[WarmupRequest, ...]:
    """Split what `num_blocks` committed blocks can hold into requests, up to a full batch.

    Block 0 is vLLM's null block and is left alone. Each request keeps room for one decoded token.

    Raises:
        CapacityError: not even one token fits.
    """
    requests: list[WarmupRequest] = []
    next_block, left = 1, max_num_batched_tokens
    while left > 0 and next_block < num_blocks and len(requests) < max_num_seqs:
        room = (num_blocks - next_block) * block_size - 1
        num_tokens = min(left, max_model_len - _SAMPLED, room)
        if num_tokens < 1:
            break
        count = -(-(num_tokens + 1) // block_size)
        block_ids = tuple(range(next_block, next_block + count))
        requests.append(WarmupRequest(f"_pdkv_warmup_{len(requests)}_", num_tokens, block_ids))
        next_block, left = next_block + count, left - num_tokens
    if not requests:
        raise CapacityError(
            f"warmup needs at least 2 committed blocks (block 0 is never used), found {num_blocks}; "
            "raise PDKV_WARMUP_BLOCKS (--warmup-blocks) or unset it."
        )
    return tuple(requests)


def run_warmup(
    requests: Sequence[WarmupRequest],
    execute_model: Callable[[SchedulerOutput], Any],
    sample_tokens: Callable[[None], Any],
    connector_metadata: Any,
) -> int:
    """Prefill all `requests` in one step, decode one token each, end them. Returns the tokens whose KV was written."""
    steps = (_prefill(requests), _decode(requests), _finish(requests))
    for step in steps:
        step.kv_connector_metadata = connector_metadata
        if execute_model(step) is None:
            sample_tokens(None)
    return sum(request.num_tokens + 1 for request in requests)


def _prefill(requests: Sequence[WarmupRequest]) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    for request in requests:
        tokens = [1 + index % 97 for index in range(request.num_tokens)]
        step.scheduled_new_reqs.append(
            NewRequestData(
                req_id=request.req_id,
                prompt_token_ids=tokens,
                mm_features=[],
                sampling_params=sampling,
                pooling_params=None,
                block_ids=(list(request.block_ids),),
                num_computed_tokens=0,
                lora_request=None,
                prefill_token_ids=tokens,
            )
        )
        step.num_scheduled_tokens[request.req_id] = request.num_tokens
    step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
    return step


def _decode(requests: Sequence[WarmupRequest]) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    cached = CachedRequestData.make_empty()
    cached.req_ids = [request.req_id for request in requests]
    cached.new_block_ids = [None for _ in requests]
    cached.num_computed_tokens = [request.num_tokens for request in requests]
    cached.num_output_tokens = [1 for _ in requests]
    step.scheduled_cached_reqs = cached
    step.num_scheduled_tokens = {request.req_id: 1 for request in requests}
    step.total_num_scheduled_tokens = len(requests)
    return step


def _finish(requests: Sequence[WarmupRequest]) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.finished_req_ids = {request.req_id for request in requests}
    return step
