"""What plans of all kinds become in addresses and strides: copies and sums by kernels, beside those of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import LAYERS, PLANS, Case, make_case, shape

from pdkv.transfer.shards import HeadSlice
from pdkv_connectors.ipc.plan import PagePlan, plan_pages
from pdkv_connectors.ipc.unit_kernel import UnitKernel, UnitOffsets, whole_pages
from pdkv_connectors.native import Kernels, Numbers

pytestmark = pytest.mark.cpu

KERNELS = Kernels()
COPIES = {name: plan for name, plan in PLANS.items() if not plan.quantize} | {
    "64-hnc-to-64-nhc": plan_pages(shape(4, 64, 256), shape(4, 64, 256, hnc=False)),
    "128-hnc-to-64-nhc": plan_pages(shape(2, 128, 128), shape(4, 64, 128, hnc=False), HeadSlice(2, destination=1)),
    "rows-within-lines": plan_pages(shape(3, 16, 40), shape(3, 32, 40, hnc=False)),
}
each_plan = pytest.mark.parametrize("plan", COPIES.values(), ids=COPIES)


def layers(memory: torch.Tensor, stride: int) -> Numbers:
    return memory.data_ptr() + np.arange(LAYERS, dtype=np.int64) * stride


def moved(case: Case) -> tuple[UnitKernel, UnitOffsets, Numbers, Numbers]:
    kernel = UnitKernel(case.plan, KERNELS)
    units = kernel.offsets(case.source_units.numpy(), case.destination_units.numpy())
    return kernel, units, layers(case.source, case.source_stride), layers(case.destination, case.destination_stride)


def sums_of(case: Case) -> Numbers:
    return layers(case.sums, case.sums.stride(0) * 8)


@pytest.mark.parametrize("streams", [True, False])
@each_plan
def test_units_are_copied_to_their_places(plan: PagePlan, streams: bool) -> None:
    case = make_case(plan, units=13)
    kernel, units, source, destination = moved(case)
    kernel.copy(source, destination, units, streams=streams)
    assert torch.equal(case.destination, case.expected)


@pytest.mark.parametrize("streams", [True, False])
@each_plan
def test_units_are_copied_and_found_to_be_what_was_summed(plan: PagePlan, streams: bool) -> None:
    case = make_case(plan, units=13)
    kernel, units, source, destination = moved(case)
    assert kernel.copy_and_check(source, destination, sums_of(case), units, streams=streams) is None
    assert torch.equal(case.destination, case.expected)


@each_plan
def test_a_unit_of_any_layer_that_was_damaged_is_named_by_its_place(plan: PagePlan) -> None:
    case = make_case(plan, units=13)
    kernel, units, source, destination = moved(case)
    last_byte = int(units.source[7]) + (plan.heads.count - 1) * plan.source.head_stride
    last_byte += (plan.unit - 1) * plan.source.state_stride + plan.source.content_bytes - 1
    case.source[(LAYERS - 1) * case.source_stride + last_byte] ^= 64
    assert kernel.copy_and_check(source, destination, sums_of(case), units, streams=True) == 7


@each_plan
def test_pages_are_summed_as_numpy_sums_them(plan: PagePlan) -> None:
    case = make_case(plan, units=13)
    kernel = UnitKernel(whole_pages(plan.source), KERNELS)
    found, blocks = torch.zeros_like(case.sums), np.arange(case.sums.shape[1])[::-1]
    kernel.sum(
        layers(case.source, case.source_stride), layers(found, found.stride(0) * 8), kernel.offsets(blocks, blocks)
    )
    assert torch.equal(found, case.sums)
