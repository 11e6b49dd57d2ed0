"""Plans as hypothesis strategies: a plan that fails is shrunk to a few requests and faults. Needs hypothesis."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hypothesis import strategies as st

from pdkv.testing.faults.plan import (
    BLOCK_TOKENS,
    MESSAGE_FAULTS,
    TRANSFER_FAULTS,
    Fault,
    FaultKind,
    Plan,
    RequestPlan,
)

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")


def _tenths(most: int) -> SearchStrategy[float]:
    """Seconds, in tenths: shorter to print than floats, and simple ones come first."""
    return st.integers(0, most * 10).map(lambda tenths: tenths / 10)


def _or_default(default: T, other: SearchStrategy[T]) -> SearchStrategy[T]:
    return st.one_of(st.just(default), other)


def _faults() -> SearchStrategy[Fault]:
    def of(kinds: tuple[FaultKind, ...], most: int) -> SearchStrategy[Fault]:
        return st.builds(Fault, st.sampled_from(kinds), st.integers(0, most), _or_default(0.0, _tenths(60)))

    counted = (*MESSAGE_FAULTS, *TRANSFER_FAULTS, FaultKind.BAD_REGION)
    timed = tuple(kind for kind in FaultKind if kind not in counted)
    return st.one_of(of(MESSAGE_FAULTS, 40), of((*TRANSFER_FAULTS, FaultKind.BAD_REGION), 5), of(timed, 300))


def _requests() -> SearchStrategy[RequestPlan]:
    tokens = st.one_of(st.sampled_from((1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1)), st.integers(1, 96))
    return st.builds(
        RequestPlan,
        start_s=_or_default(0.0, _tenths(60)),
        num_tokens=tokens,
        chunks=st.integers(1, 4),
        prefill_s=st.sampled_from((0.1, 1.0, 8.0)),
        early=st.booleans(),
        extra_block=st.booleans(),
        cached_blocks=st.integers(0, 1),
        queue_s=_or_default(0.0, _tenths(45)),
        steps=st.integers(1, 5),
        gone_s=st.one_of(st.none(), _tenths(12)),
        preempt=st.sampled_from((None, "loading", "decoding")),
        altered=_or_default(False, st.booleans()),
        replay_s=st.one_of(st.none(), _tenths(40)),
    )


def plans(max_requests: int = 6, max_faults: int = 5) -> SearchStrategy[Plan]:
    """Schedules of up to so many requests and faults."""
    return st.builds(
        Plan,
        requests=st.lists(_requests(), min_size=1, max_size=max_requests).map(tuple),
        faults=st.lists(_faults(), max_size=max_faults).map(tuple),
        mode=st.sampled_from(("pull", "push")),
        on_failure=st.sampled_from(("fail", "recompute")),
        prefill_blocks=st.sampled_from((64, 16, 10)),
        decode_blocks=st.sampled_from((32, 12, 9)),
        hold_s=st.sampled_from((0.0, 3.0, 30.0)),
        capacity=st.sampled_from((64, 4, 2)),
        clock_offset_s=st.sampled_from((0.0, 1e6, -1e3)),
        block_s=st.sampled_from((0.002, 0.3, 5.0)),
        fenced=st.booleans(),
    )
