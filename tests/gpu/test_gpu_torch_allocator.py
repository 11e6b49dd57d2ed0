"""The reading after warmup and the cap on torch's allocator, on a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdkv.kvcache.sizing_constants import GIB, MIB, SizingConstants
from pdkv.kvcache.torch_allocator import (
    cap_torch_allocator,
    read_torch,
    start_warmup_reading,
    uncap_torch_allocator,
)

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")


@pytest.fixture
def device() -> Iterator[int]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield 0
    uncap_torch_allocator(0)
    torch.cuda.empty_cache()


def test_the_reading_empties_torchs_cache_and_keeps_the_peak(device: int) -> None:
    start_warmup_reading(device)
    before = read_torch(device)
    torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")  # freed at once, kept in torch's cache
    assert torch.cuda.memory_reserved(device) >= 2 * GIB
    after = read_torch(device)
    assert after.free == before.free
    assert after.transient_peak() >= 2 * GIB


def test_a_capped_torch_fails_before_the_reserve_and_gives_back_its_cache_first(device: int) -> None:
    reserve = 4 * GIB
    read_torch(device)
    cap_torch_allocator(device, SizingConstants(non_torch_reserve_bytes=reserve))
    free, _ = torch.cuda.mem_get_info(device)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(free - reserve + 256 * MIB, dtype=torch.uint8, device="cuda")
    part = (free - reserve) * 3 // 5
    torch.empty(part, dtype=torch.uint8, device="cuda")  # leaves a cached segment of this size behind
    kept = torch.empty(part + 512 * MIB, dtype=torch.uint8, device="cuda")  # fits only once that is given back
    assert torch.cuda.mem_get_info(device)[0] >= reserve
    del kept


def test_the_cap_can_be_lifted(device: int) -> None:
    cap_torch_allocator(device, SizingConstants(non_torch_reserve_bytes=4 * GIB))
    uncap_torch_allocator(device)
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.empty(free - 1 * GIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info(device)[0] < 2 * GIB
    del held
