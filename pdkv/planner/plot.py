"""KV memory of one request over context length, with what a rank has room for. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from pdkv.picture import axes_saved_to
from pdkv.planner.groups import cache_shape
from pdkv.planner.plan import Plan

_POINTS = 200


def context_curve(plan: Plan, points: int = _POINTS) -> list[tuple[int, int]]:
    """(context in tokens, bytes on the rank with the largest blocks) of one request, up to the plan's context."""
    request = plan.request
    shape = cache_shape(plan.model, request.page_format, request.pipeline_parallel)
    block = shape.block_bytes(shape.widest_stage)
    contexts = sorted({max(1, plan.context * i // points) for i in range(1, points + 1)})

    def blocks(context: int) -> int:
        return shape.blocks_per_request(
            context, in_flight_tokens=request.in_flight_tokens, state_blocks=request.state_blocks
        )

    return [(context, blocks(context) * block) for context in contexts]


def save_plot(plan: Plan, path: str | Path) -> None:
    """Write the curve as an image; the ending of `path` chooses the format (png, svg, pdf).

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written in that format.
    """
    curve = context_curve(plan)
    with axes_saved_to(path) as axes:
        axes.plot([tokens for tokens, _ in curve], [nbytes / (1 << 30) for _, nbytes in curve], label="one request")
        axes.axhline(plan.pool.cache_bytes / (1 << 30), linestyle="--", color="0.4", label="KV cache of a rank")
        axes.set_xlabel("context length, tokens")
        axes.set_ylabel("KV on a rank, GiB")
        axes.set_title(f"{plan.model.name}, KV cache {plan.request.kv_cache_dtype}, tp {plan.request.tensor_parallel}")


__all__ = ["context_curve", "save_plot"]
