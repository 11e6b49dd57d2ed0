"""Short runs packed into messages, and put where they belong: by kernels and by numpy the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig
from pdkv.memory import HostDriver
from pdkv.transfer.geometry import CacheGeometry
from pdkv_connectors.ucx import memory as ucx_memory
from pdkv_connectors.ucx.memory import Memory, parts_of

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module", params=[True, False], ids=["kernels", "numpy"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Memory, Memory, GrowableKVCache, GrowableKVCache]]:
    """Two caches as UCX has them."""
    with ExitStack() as stack:
        driver = HostDriver(4096)
        stack.callback(driver.close)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if not request.param:
            patch.setattr(ucx_memory, "find_kernels", lambda: None)
        config = KVCacheConfig.uniform(["layer"], AttentionSpec(2, 16, 64, "float16"), 600)
        source, destination = (stack.enter_context(GrowableKVCache(config, driver)) for _ in range(2))
        memories = []
        for cache in (source, destination):
            cache.commit(600)
            memories.append(Memory(cache, tuple(CacheGeometry.of(cache, None).extents())))
        yield memories[0], memories[1], source, destination


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 600_000), min_size=1, max_size=9), gap=st.integers(0, 70), streamed=st.booleans())
def test_what_is_packed_and_unpacked_is_where_it_belongs_and_nothing_else_is_touched(
    pair: tuple[Memory, Memory, GrowableKVCache, GrowableKVCache], sizes: list[int], gap: int, streamed: bool
) -> None:
    sender, receiver, source, destination = pair
    source.raw_tensor().copy_(torch.randint(-128, 128, (source.bytes_reserved,), dtype=torch.int8))
    found = destination.raw_tensor().zero_()
    nbytes = np.array(sizes * (3 if streamed else 1), np.int64)
    nbytes = nbytes[np.cumsum(nbytes + gap) < destination.bytes_reserved]
    to = np.cumsum(nbytes + gap) - nbytes
    from_ = np.ascontiguousarray(to[::-1] // 2)
    wanted = torch.zeros_like(found)
    for take, put, size in zip(from_.tolist(), to.tolist(), nbytes.tolist(), strict=True):
        wanted[put : put + size] = source.raw_tensor()[take : take + size]
    for part in parts_of(nbytes):
        buffer = receiver.incoming(part, to)
        buffer[:] = sender.outgoing(part, from_, nbytes)
        receiver.unpack(buffer, part, to, nbytes)
    assert torch.equal(found, wanted)
