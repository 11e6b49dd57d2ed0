"""The Triton kernels, run by Triton's interpreter on the CPU, against torch's own operations, byte for byte."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.cpu
pytest.importorskip("triton", reason="the kernels are Triton's; its wheel is not part of every set-up")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run this file by itself with TRITON_INTERPRET=1", allow_module_level=True)

# ruff: noqa: E402
from kernel_cases import LAYERS, PLANS, Case, make_case

from pdkv_connectors.ipc.constants import BESIDE_OTHERS, WHOLE_DEVICE, Tiling, copy_constants, sum_constants
from pdkv_connectors.ipc.hashing import WORD_NBYTES, key_table
from pdkv_connectors.ipc.kernels import copy_pages, sum_pages

UNITS = 5


def keys_for(case: Case) -> torch.Tensor:
    return torch.tensor(key_table(case.plan.source.nbytes // WORD_NBYTES), dtype=torch.int64)


def copy(case: Case, *, verify: bool, programs: int, tiling: Tiling = WHOLE_DEVICE) -> int:
    pointers = torch.tensor(case.source_pages + case.destination_pages + case.sum_pages, dtype=torch.int64)
    ids = torch.cat((case.source_units, case.destination_units)).int()
    if len(ids) == 2:
        ids.fill_(1 << 20)  # whoever reads them goes far astray
    fault = torch.zeros(1, dtype=torch.int32)
    align = case.plan.alignment(*case.source_pages, *case.destination_pages)
    constants = copy_constants(case.plan, LAYERS, align, verify=verify, tiling=tiling)
    units, firsts = len(case.source_units), (int(case.source_units[0]), int(case.destination_units[0]))
    copy_pages[(programs,)](pointers, ids, keys_for(case), case.inverses, fault, units, *firsts, **constants)
    return int(fault)


@pytest.mark.parametrize("name", PLANS)
def test_the_copy_kernel_equals_torch_and_finds_all_sums_right(name: str) -> None:
    # The interpreter's fp8 rounds subnormal numbers and carries in ways of its own; a GPU is compared on all numbers.
    case = make_case(PLANS[name], UNITS, exact=PLANS[name].quantize)
    fault = copy(case, verify=case.plan.can_verify, programs=UNITS * LAYERS)
    assert fault == 0
    assert torch.equal(case.destination, case.expected)


@pytest.mark.parametrize("name", PLANS)
def test_few_programs_copy_everything_too_and_find_all_sums_right(name: str) -> None:
    case = make_case(PLANS[name], UNITS, exact=PLANS[name].quantize)
    assert copy(case, verify=case.plan.can_verify, programs=2, tiling=BESIDE_OTHERS) == 0
    assert torch.equal(case.destination, case.expected)


def test_copies_of_single_units_add_up_to_one_of_all() -> None:
    case = make_case(PLANS["equal"], UNITS)
    source, destination = case.source_units, case.destination_units
    for place in range(UNITS):
        case.source_units, case.destination_units = source[place : place + 1], destination[place : place + 1]
        assert copy(case, verify=True, programs=LAYERS) == 0
    assert torch.equal(case.destination, case.expected)


@pytest.mark.parametrize("name", ["equal", "hnc-to-nhc", "half-the-heads-nhc", "fp8-and-all"])
def test_the_copy_kernel_names_the_unit_whose_bytes_are_not_what_was_summed(name: str) -> None:
    case = make_case(PLANS[name], UNITS)
    plan, place = case.plan, 3
    unit = int(case.source_units[place])
    where = unit // plan.source_units * plan.source.block_stride + plan.first_source_byte
    where += unit % plan.source_units * plan.unit * plan.source.state_stride
    case.source[LAYERS // 2 * case.source_stride + where + 9] ^= 4
    assert copy(case, verify=True, programs=UNITS * LAYERS) == place + 1


@pytest.mark.parametrize("name", ["equal", "equal-large", "equal-odd", "mla", "nhc-to-hnc", "64-to-16-large"])
def test_the_sum_kernel_equals_torch(name: str) -> None:
    case = make_case(PLANS[name], UNITS)
    shape, blocks = case.plan.source, case.sums.shape[1]
    found = torch.zeros_like(case.sums)
    sums = [found.data_ptr() + 8 * layer * found.stride(0) for layer in range(LAYERS)]
    pages = [case.source.data_ptr() + layer * case.source_stride for layer in range(LAYERS)]
    constants = sum_constants(shape, LAYERS, case.plan.alignment(*pages))
    ids = torch.randperm(blocks).int()
    programs = blocks * LAYERS * shape.sums
    sum_pages[(programs,)](torch.tensor(pages + sums), ids, keys_for(case), blocks, **constants)
    assert torch.equal(found, case.sums)
