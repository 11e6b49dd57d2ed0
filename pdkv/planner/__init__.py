"""The capacity planner: what a model's KV cache takes, and what fits where.

    from pdkv.planner import PlanRequest, make_plan
    plan = make_plan(PlanRequest(model="llama-3.1-70b", gpu="h200", tensor_parallel=4, context=131072))
    plan.pool.max_requests

``python -m pdkv.plan`` is the same as a program.
"""

from __future__ import annotations

from pdkv.planner.capacity import Capacity, MemoryBudget, WaitingShare
from pdkv.planner.dtypes import KV_CACHE_DTYPES
from pdkv.planner.layers import ModelShape, PageFormat
from pdkv.planner.model_config import read_model
from pdkv.planner.plan import Plan, PlanRequest, Traffic, make_plan
from pdkv.planner.presets import find_model, gpu_memory, gpu_names, model_names

__all__ = [
    "KV_CACHE_DTYPES",
    "Capacity",
    "MemoryBudget",
    "ModelShape",
    "PageFormat",
    "Plan",
    "PlanRequest",
    "Traffic",
    "WaitingShare",
    "find_model",
    "gpu_memory",
    "gpu_names",
    "make_plan",
    "model_names",
    "read_model",
]
