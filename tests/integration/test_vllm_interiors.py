"""What vLLM's kernels write lies in a page as `page_interior.py` says, and moves into blocks of another size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import vllm._C  # noqa: F401  registers the operators
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

import pdkv
from pdkv.kvcache import PageSpec
from pdkv.transfer.blocks import BlockRun, pair_by_index, units_of
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.shards import HeadSlice
from pdkv_connectors.ipc import IpcTransport
from pdkv_connectors.vllm.page_interior import interior_of

pytestmark = pytest.mark.vllm

HEADS, HEAD_SIZE, TOKENS = 4, 64, 150
P, D = EngineRef("P", 1), EngineRef("D", 1)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    torch.manual_seed(3)
    with ExitStack() as stack:
        yield stack


def spec_of(block_size: int, dtype: torch.dtype, heads: int = HEADS) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=dtype)


def interior(spec: FullAttentionSpec, backend: type = CPUAttentionBackend, layout: str = "LBHNC") -> Any:
    layers = {"a": SimpleNamespace(get_attn_backend=lambda: backend)}
    vllm_config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])
    config: Any = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout=layout)
    return interior_of(vllm_config, config)


def cache_of(stack: ExitStack, block_size: int, dtype: torch.dtype, heads: int = HEADS) -> pdkv.GrowableKVCache:
    spec = spec_of(block_size, dtype, heads)
    name = str(dtype).removeprefix("torch.")
    content = 2 * HEAD_SIZE * dtype.itemsize
    page = PageSpec(heads, block_size, content, block_size, name, interior=interior(spec))
    config = pdkv.KVCacheConfig.uniform(["a"], page, 12, pdkv.KVCacheLayout.LBHNC)
    cache = stack.enter_context(pdkv.GrowableKVCache(config, pdkv.open_driver("host", granule=65536)))
    cache.commit(12)
    return cache


def write(cache: pdkv.GrowableKVCache, blocks: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
    """As vLLM's attention layer does; keys and values ``[tokens, H, head size]``."""
    view = cache.views()["a"]
    num_blocks, heads, block_size, _ = view.shape
    halves = view.view(num_blocks, heads, 2 * block_size, -1).chunk(2, dim=2)
    slots = torch.tensor([blocks[n // block_size] * block_size + n % block_size for n in range(len(keys))])
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, "vec")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("there", "here"), [(32, 64), (64, 32), (32, 32)])
def test_what_a_kernel_wrote_is_what_it_would_have_written_into_other_blocks(
    stack: ExitStack, there: int, here: int, dtype: torch.dtype
) -> None:
    if interior(spec_of(there, dtype)) != "columns":
        pytest.skip(f"this CPU's kernels arrange {dtype} in a way of their own, and such blocks keep their size")
    blocks = {32: [3, 8, 1, 5, 2], 64: [4, 1, 7]}
    keys, values = (torch.randn(TOKENS, HEADS, HEAD_SIZE).to(dtype) for _ in range(2))
    source, wanted, found = (
        cache_of(stack, size, dtype, heads) for size, heads in ((there, HEADS), (here, 2), (here, 2))
    )
    write(source, blocks[there], keys, values)
    write(wanted, blocks[here], keys[:, 2:], values[:, 2:])  # a rank with the other half of the heads
    owner, reader = IpcTransport(), IpcTransport()
    for transport, cache, engine in ((owner, source, P), (reader, found, D)):
        stack.callback(transport.close)
        transport.register(cache, engine)
    reader.connect(P, owner.describe(), timeout_s=20.0, heads=HeadSlice(2, source=2))
    runs = (BlockRun(0, tuple(blocks[there])),), (BlockRun(0, tuple(blocks[here])),)
    transfer = reader.read(P, pair_by_index(*units_of(*runs, (there, here), TOKENS)))
    assert transfer.wait(20.0) == "done", transfer.reason
    assert torch.equal(found.views()["a"], wanted.views()["a"])


def test_what_is_not_known_of_a_backend_is_opaque() -> None:
    class Backend:
        __module__ = "vllm.v1.attention.backends.flash_attn"
        sizes: ClassVar[list[Any]] = [16]

        @classmethod
        def get_supported_kernel_block_sizes(cls) -> list[Any]:
            return cls.sizes

    spec = spec_of(32, torch.bfloat16)
    assert interior(spec, Backend, "LBNHC") == "tokens"
    assert interior(spec, Backend, "LBHNC") == "opaque"  # two blocks of the kernel's, each with all heads
    Backend.sizes = [32]
    assert interior(spec, Backend, "LBHNC") == "tokens"
    Backend.__module__ = "vllm.v1.attention.backends.rocm_attn"
    assert interior(spec, Backend, "LBNHC") == "opaque"
