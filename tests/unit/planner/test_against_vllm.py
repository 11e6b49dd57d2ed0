"""The planner's groups, block bytes and dtypes against the functions of the vLLM that is installed."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pdkv.planner.dtypes import HeadShape, head_bytes
from pdkv.planner.groups import cache_shape
from pdkv.planner.layers import (
    AttentionLayer,
    CrossAttentionLayer,
    IndexerLayer,
    LatentLayer,
    Layer,
    ModelShape,
    PageFormat,
    StateLayer,
    heads_per_rank,
)
from pdkv.planner.model_config import read_model
from pdkv.planner.presets import find_model, model_names

pytestmark = pytest.mark.vllm

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")


@pytest.fixture(scope="module")
def planning() -> ModuleType:
    """The module with vLLM's grouping: its name changed between 0.32 and 0.33."""
    try:
        from vllm.v1.core import kv_cache_planning as module
    except ImportError:
        from vllm.v1.core import kv_cache_utils as module
    return module


def layout() -> Any:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return KVCacheLayout.LBNHC


def vllm_config() -> Any:
    """As much of vLLM's configuration as its grouping reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=layout, num_gpu_blocks_override=None),
    )


def vllm_spec(layer: Layer, form: PageFormat, dtype: Any, state_page: int) -> Any:
    """The spec that vLLM makes of a layer, written out independently of the planner's page sizes."""
    common = {"block_size": form.block_size, "dtype": dtype}
    if isinstance(layer, LatentLayer):
        return interface.MLAAttentionSpec(
            num_kv_heads=1, head_size=layer.kv_lora_rank + layer.qk_rope_head_dim, **common
        )
    if isinstance(layer, IndexerLayer):
        return interface.MLAAttentionSpec(num_kv_heads=1, head_size=132, block_size=form.block_size, dtype=torch.uint8)
    if isinstance(layer, StateLayer):
        shapes = tuple((tensor.elements(form.tensor_parallel),) for tensor in layer.tensors)
        dtypes = tuple(dtype if tensor.dtype == "auto" else getattr(torch, tensor.dtype) for tensor in layer.tensors)
        return interface.MambaSpec(block_size=1 << 20, shapes=shapes, dtypes=dtypes, page_size_padded=state_page)
    assert isinstance(layer, AttentionLayer | CrossAttentionLayer)
    heads = {
        "num_kv_heads": heads_per_rank(layer.num_kv_heads, form.tensor_parallel),
        "head_size": layer.head.key_size,
        "head_size_v": layer.head.value_size,
    }
    if isinstance(layer, CrossAttentionLayer):
        return interface.CrossAttentionSpec(**heads, **common)
    if layer.window:
        return interface.SlidingWindowSpec(sliding_window=layer.window, **heads, **common)
    return interface.FullAttentionSpec(**heads, **common)


def vllm_groups(planning: ModuleType, model: ModelShape, form: PageFormat) -> Any:
    dtype = getattr(torch, model.dtype)
    one_token = PageFormat(form.tensor_parallel, block_size=1)
    layers = [layer for block in model.layers for layer in block]
    token = max(layer.page(one_token, model.dtype).nbytes for layer in layers if not isinstance(layer, StateLayer))
    specs = {
        f"{index}.{slot}": vllm_spec(layer, form, dtype, token * form.block_size)
        for index, block in enumerate(model.layers)
        for slot, layer in enumerate(block)
    }
    return planning.get_kv_cache_groups(vllm_config(), specs)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in model_names() if name != "smollm2-135m"])
def test_groups_and_block_bytes_are_those_of_vllm(planning: ModuleType, name: str, tensor_parallel: int) -> None:
    source = find_model(name)
    model = read_model(source.config, name)
    form = PageFormat(tensor_parallel=tensor_parallel)
    shape = cache_shape(model, form)
    theirs = vllm_groups(planning, model, PageFormat(tensor_parallel, shape.block_size))
    assert len(shape.groups) == len(theirs)
    assert sorted(len(group.pages) for group in shape.groups) == sorted(len(group.layer_names) for group in theirs)
    assert shape.block_bytes() == planning._get_kv_cache_bytes_per_block(theirs, layout())


@pytest.mark.parametrize("dtype", ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_turboquant_slots_are_those_of_vllm(dtype: str, size: int) -> None:
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

    expected = TurboQuantConfig.from_cache_dtype(dtype, size).slot_size_aligned
    assert head_bytes(dtype, HeadShape(size, size, size), "bfloat16") == expected


@pytest.mark.parametrize("size", [64, 128, 256])
def test_nvfp4_slots_are_those_of_vllm(size: int) -> None:
    from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim

    assert head_bytes("nvfp4", HeadShape(size, size, size), "bfloat16") == 2 * nvfp4_kv_cache_full_dim(size)
