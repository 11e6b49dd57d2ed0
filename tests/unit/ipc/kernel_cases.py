"""Pairs of page shapes that a copy must get right, and what is compared: shared by the tests on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pdkv.transfer.shards import HeadSlice
from pdkv_connectors.ipc.convert import copy_units, page_keys, page_view, take_units, unit_view
from pdkv_connectors.ipc.hashing import hash_granules
from pdkv_connectors.ipc.plan import PagePlan, PageShape, plan_pages

LAYERS = 3


def shape(
    heads: int, states: int, content: int, *, hnc: bool = True, padding: int = 0, dtype: str = "bfloat16"
) -> PageShape:
    """A dense page, `padding` bytes from the next."""
    strides = (states * content, content) if hnc else (content, heads * content)
    return PageShape(heads, states, content, *strides, heads * states * content + padding, dtype)


FP8 = "float8_e4m3fn"
PLANS: dict[str, PagePlan] = {
    "equal": plan_pages(shape(8, 16, 256), shape(8, 16, 256)),
    "equal-large": plan_pages(shape(8, 64, 256), shape(8, 64, 256)),
    "equal-padded": plan_pages(shape(2, 16, 256, padding=64), shape(2, 16, 256)),
    "equal-odd": plan_pages(shape(3, 24, 128), shape(3, 24, 128)),
    "mla": plan_pages(shape(1, 16, 1152), shape(1, 16, 1152)),
    "16-to-64": plan_pages(shape(4, 16, 256), shape(4, 64, 256)),
    "64-to-16": plan_pages(shape(4, 64, 256), shape(4, 16, 256)),
    "64-to-16-large": plan_pages(shape(4, 64, 1024), shape(4, 16, 1024)),
    "16-to-32-nhc": plan_pages(shape(4, 16, 256, hnc=False), shape(4, 32, 256, hnc=False)),
    "hnc-to-nhc": plan_pages(shape(8, 16, 256), shape(8, 16, 256, hnc=False)),
    "nhc-to-hnc": plan_pages(shape(8, 16, 256, hnc=False), shape(8, 16, 256)),
    "16-hnc-to-64-nhc": plan_pages(shape(4, 16, 256), shape(4, 64, 256, hnc=False)),
    "64-nhc-to-16-hnc": plan_pages(shape(4, 64, 256, hnc=False), shape(4, 16, 256)),
    "half-the-heads": plan_pages(shape(8, 16, 256), shape(4, 16, 256), HeadSlice(4, source=4)),
    "half-the-heads-nhc": plan_pages(
        shape(8, 16, 256, hnc=False), shape(4, 16, 256, hnc=False), HeadSlice(4, source=4)
    ),
    "into-half": plan_pages(shape(2, 16, 256), shape(8, 64, 256, hnc=False), HeadSlice(2, destination=4)),
    "one-head": plan_pages(shape(4, 16, 256, hnc=False), shape(1, 32, 256), HeadSlice(1, source=2)),
    "fp8": plan_pages(shape(8, 16, 256), shape(8, 16, 128, dtype=FP8), quantize=True),
    "fp8-and-all": plan_pages(
        shape(8, 64, 256), shape(4, 16, 128, hnc=False, dtype=FP8), HeadSlice(4, source=2), quantize=True
    ),
}


@dataclass
class Case:
    """Both caches of one plan, blocks paired at random, and what the destination must become."""

    plan: PagePlan
    source: torch.Tensor  # int8, all layers one after the other
    destination: torch.Tensor
    expected: torch.Tensor
    source_units: torch.Tensor
    destination_units: torch.Tensor
    sums: torch.Tensor  # int64 [LAYERS, blocks, H, N / G]
    inverses: torch.Tensor  # float32 [LAYERS, 2]
    source_stride: int
    destination_stride: int

    @property
    def source_pages(self) -> list[int]:
        """Addresses of block 0's page of each layer, from the first head that is copied on."""
        first = self.source.data_ptr() + self.plan.first_source_byte
        return [first + layer * self.source_stride for layer in range(LAYERS)]

    @property
    def destination_pages(self) -> list[int]:
        first = self.destination.data_ptr() + self.plan.first_destination_byte
        return [first + layer * self.destination_stride for layer in range(LAYERS)]

    @property
    def sum_pages(self) -> list[int]:
        """Addresses of block 0's first sum of each layer, from the first head that is copied on."""
        first = self.sums.data_ptr() + 8 * self.plan.heads.source * self.plan.source.granules
        return [first + layer * self.sums.stride(0) * 8 for layer in range(LAYERS)]


def make_case(plan: PagePlan, units: int, device: str = "cpu", seed: int = 1, *, exact: bool = False) -> Case:
    """Random bytes (all bf16 numbers, infinities and NaN among them) and `units` pairs of units at random.

    Args:
        exact: only numbers that need no rounding to become fp8, and infinities and NaN.
    """
    generator = torch.Generator().manual_seed(seed)

    def random_order(blocks: int, units_in_block: int) -> torch.Tensor:
        return torch.randperm(blocks * units_in_block, generator=generator)[:units]

    blocks = [-(-units // plan.source_units) + 2, -(-units // plan.destination_units) + 3]
    strides = [side.block_stride * count for side, count in zip((plan.source, plan.destination), blocks, strict=True)]
    source, destination = (
        torch.randint(-128, 128, (LAYERS * stride,), dtype=torch.int8, generator=generator) for stride in strides
    )
    if exact:
        eighths = torch.randint(8, 16, (source.numel() // 2,), generator=generator) / 8
        powers = torch.randint(-5, 12, (source.numel() // 2,), generator=generator)
        numbers = (eighths * 2.0**powers * (source[::2].sign() + 0.5).sign()).bfloat16()
        numbers[::97], numbers[5::89], numbers[7::83] = float("inf"), float("-inf"), float("nan")
        source = numbers.view(torch.int8)
    source_units = random_order(blocks[0], plan.source_units)
    destination_units = random_order(blocks[1], plan.destination_units)
    inverses = torch.ones(LAYERS, 2) if exact else torch.rand(LAYERS, 2, generator=generator) * 4
    expected = destination.clone()
    sums = []
    for layer in range(LAYERS):
        pages = page_view(source, plan.source, blocks[0], layer * strides[0])
        target = page_view(expected, plan.destination, blocks[1], layer * strides[1])
        k, v = inverses[layer].tolist()
        units = take_units(unit_view(pages, plan.unit, plan.heads.source, plan.heads.count), source_units.numpy())
        copy_units(plan, units, target, destination_units.numpy(), (k, v))
        sums.append(torch.from_numpy(hash_granules(pages.view(torch.int64).numpy(), page_keys(plan.source))))
    tensors: list[Any] = [source, destination, expected, source_units, destination_units, torch.stack(sums), inverses]
    return Case(plan, *(tensor.to(device) for tensor in tensors), *strides)
