"""The cap on torch's allocator, as arithmetic; `tests/gpu` has it on a device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.kvcache.torch_allocator import TorchReading, cap_fraction

pytestmark = pytest.mark.cpu


def test_torch_may_hold_what_it_has_and_what_is_free_beyond_the_reserve() -> None:
    assert cap_fraction(free=30, total=100, reserved=20, reserve_bytes=10) == 0.4


def test_a_cap_never_takes_what_torch_holds_already() -> None:
    assert cap_fraction(free=5, total=100, reserved=20, reserve_bytes=10) == 0.2


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_the_share_is_one_that_torch_accepts(free: int, used: int, reserved: int, reserve: int) -> None:
    total = free + used + reserved + 1
    assert 0 < cap_fraction(free=free, total=total, reserved=reserved, reserve_bytes=reserve) <= 1


def test_the_transient_peak_is_live_memory_beyond_what_stays() -> None:
    reading = TorchReading(free=0, total=100, allocated=40, peak_allocated=55, reserved=90)
    assert reading.transient_peak() == 15
    assert reading.transient_peak(profiled_activation_bytes=20) == 20
