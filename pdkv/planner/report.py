"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Iterable

from pdkv.planner.capacity import Capacity
from pdkv.planner.plan import Plan

_Row = tuple[str, str]


def render(plan: Plan) -> str:
    """The plan as text: sections of two columns, and a table of remedies where the context does not fit."""
    sections = [
        ("model", _model_rows(plan)),
        ("memory per rank", _memory_rows(plan)),
        ("pool", _pool_rows(plan)),
        ("traffic", _traffic_rows(plan)),
    ]
    text = [f"{title}\n{_columns(rows)}" for title, rows in sections if rows]
    if plan.remedies:
        text.append(_remedy_table(plan))
    if plan.assumed:
        names = ", ".join(name.removesuffix("_bytes").replace("_", " ") for name in plan.assumed)
        text.append(f"Assumed, not measured: {names}. An engine's log has the values; give them as options.")
    return "\n\n".join(text) + "\n"


def human_bytes(nbytes: float) -> str:
    """A size with a binary unit: 65.4 GiB, 960 KiB, 70272 B."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size * 10 or (unit in ("TiB", "GiB") and abs(nbytes) >= size):
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes:,.0f} B"


def _model_rows(plan: Plan) -> list[_Row]:
    request, shape = plan.request, plan.shape
    rows = [
        ("model", f"{plan.model.name}, {plan.model.dtype}, KV cache {request.kv_cache_dtype}"),
        ("parallel", f"tensor {request.tensor_parallel}, pipeline {request.pipeline_parallel}"),
        ("bytes per token", f"{plan.bytes_per_token:,}"),
        ("bytes per token on a rank", f"{plan.bytes_per_token_per_rank:,}"),
        (f"one request of {plan.context:,} tokens", human_bytes(plan.bytes_per_request)),
        ("block", f"{shape.block_size} tokens, {human_bytes(plan.pool.block_bytes)} on a rank"),
    ]
    if len(shape.groups) > 1:
        rows.append(("cache groups", f"{len(shape.groups)} (layers of several kinds; a request has blocks in each)"))
    return rows


def _memory_rows(plan: Plan) -> list[_Row]:
    budget = plan.budget
    if budget is None:
        return [("KV cache, as given", human_bytes(plan.pool.cache_bytes))]
    return [
        ("device", f"{human_bytes(budget.total_bytes)}, of which {budget.utilization:.0%}"),
        ("weights", human_bytes(budget.weights_bytes)),
        ("activation peak", human_bytes(budget.activation_bytes)),
        ("outside torch", human_bytes(budget.non_torch_bytes)),
        ("captured graphs", human_bytes(budget.graph_bytes)),
        (f"KV cache, {_kind(plan.request.growable)}", human_bytes(plan.pool.cache_bytes)),
    ]


def _pool_rows(plan: Plan) -> list[_Row]:
    pool = plan.pool
    rows = [
        ("blocks", f"{pool.blocks:,} (block 0 holds no tokens, watermark {pool.watermark_blocks:,})"),
        ("tokens", f"{pool.tokens:,}"),
        (f"requests of {plan.context:,} tokens", f"{pool.max_requests:,} ({pool.blocks_per_request:,} blocks each)"),
    ]
    if plan.concurrency_fits is not None:
        answer = "yes" if plan.concurrency_fits else "no"
        rows.append((f"{plan.request.concurrency:,} at once", answer))
    if plan.other is not None:
        rows.append((f"the same, {_kind(not plan.request.growable)}", _other(plan.other)))
    return rows


def _traffic_rows(plan: Plan) -> list[_Row]:
    rows: list[_Row] = []
    if (link := plan.link) is not None:
        rows.append(("moved per request", human_bytes(link.bytes_per_request)))
        rate = "none is enough: queue and prefill take longer than the target"
        if link.bytes_per_s is not None:
            rate = f"{link.bytes_per_s / 1e9:,.2f} GB/s ({link.transfer_budget_s * 1e3:,.0f} ms left for the transfer)"
        rows.append(("link rate for the target", rate))
        rows.append(("mean rate", f"{link.sustained_bytes_per_s / 1e9:,.2f} GB/s"))
        if link.transfer_s is not None:
            enough = "enough" if link.meets_target else "too slow"
            rows.append(("at the link rate given", f"{link.transfer_s * 1e3:,.0f} ms: {enough}"))
    if (leases := plan.leases) is not None:
        rows.append(("leases that P holds", f"{leases.leases:,.1f} on average, {leases.blocks:,} blocks"))
        rows.append(("renewals", f"{leases.renewals_per_s:,.1f} a second"))
        if leases.expires_unrenewed:
            rows.append(("without renewal", "leases expire before D has read"))
    if (waiting := plan.waiting) is not None:
        share = f"{waiting.expected_blocks:,} blocks ({waiting.expected_share:.1%}), at most {waiting.most_blocks:,}"
        rows.append(("waiting for remote KV", share))
        rows.append(("running beside them", f"{waiting.running_requests:,} requests of {plan.context:,} tokens"))
    if (ratio := plan.ratio) is not None:
        by_memory = ratio.decode_engines_by_memory
        memory = "" if by_memory is None else f", {by_memory:,.2f} by memory"
        rows.append(("P engines", f"{ratio.prefill_engines:,.2f}"))
        rows.append(("D engines", f"{ratio.decode_engines_by_rate:,.2f} by rate{memory}"))
        rows.append(("P:D", f"{ratio.prefill_per_decode:,.2f} : 1"))
    return rows


def _remedy_table(plan: Plan) -> str:
    title = f"One request of {plan.context:,} tokens does not fit. What would help:"
    rows = [("change", "per rank", "fits", "host", "")]
    for remedy in plan.remedies:
        host = human_bytes(remedy.host_bytes) if remedy.host_bytes else ""
        fits = "yes" if remedy.fits else "no"
        rows.append((remedy.what, human_bytes(remedy.bytes_per_rank), fits, host, remedy.note))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([title, *lines])


def _columns(rows: Iterable[_Row]) -> str:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name.ljust(width)}  {value}" for name, value in rows)


def _other(pool: Capacity) -> str:
    return f"{pool.blocks:,} blocks, {pool.tokens:,} tokens, {pool.max_requests:,} requests"


def _kind(growable: bool) -> str:
    return "growable, sized after warmup" if growable else "fixed, sized before warmup"


__all__ = ["human_bytes", "render"]
