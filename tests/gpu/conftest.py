"""What the GPU tests share: the reason to skip, a driver, a small cache, and a place for what was measured.

Everything here is skipped, with the reason, where there is no CUDA device. `benchmarks/gpu_all.py` runs all of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

# These tests are the package `gpu`, so that a file here may be called as one of the integration tests. The harness for
# child processes is theirs.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "integration")]


def _why_not() -> str | None:
    """Why nothing can run here; None where it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch is not installed: {error}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError as error:
        return f"cuda-bindings is not installed: {error}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = _why_not() if here else None
    if reason:
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def driver() -> Iterator[Any]:
    """A CUDA driver on device 0; fails if what a test took is not free again afterwards."""
    import torch

    from pdkv.memory import open_driver

    torch.cuda.init()
    driver = open_driver("cuda")
    free = driver.memory_info().free
    yield driver
    torch.cuda.empty_cache()
    left = free - driver.memory_info().free
    driver.close()
    # torch's own state (handles of libraries, modules of kernels) may appear during a test; chunks are far larger.
    assert left < 512 << 20, f"{left} bytes were not given back"


@pytest.fixture
def make_cache(driver: Any) -> Iterator[Callable[..., Any]]:
    """Build caches of `layers` by `num_blocks` pages of 64 KiB, 32 to a granule; all are closed afterwards."""
    from pdkv.kvcache import AttentionSpec, GrowableKVCache, KVCacheConfig

    built: list[Any] = []

    def make(layers: int = 4, num_blocks: int = 1024, head_size: int = 128) -> Any:
        spec = AttentionSpec(num_kv_heads=8, block_size=16, head_size=head_size, dtype="bfloat16")
        config = KVCacheConfig.uniform([f"layer{index}" for index in range(layers)], spec, num_blocks)
        built.append(GrowableKVCache(config, driver))
        return built[-1]

    yield make
    for cache in built:
        cache.close()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keep one row of a table: printed, and appended to the file that `PDKV_GPU_RECORDS` names."""

    def keep(table: str, **row: Any) -> None:
        line = json.dumps({"table": table, "test": request.node.name, **row})
        print(line)
        if path := os.environ.get("PDKV_GPU_RECORDS"):
            with open(path, "a") as file:
                print(line, file=file)

    return keep


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the random Llama that the engines run."""
    from random_llama import make_random_llama

    return make_random_llama(tmp_path_factory.mktemp("llama"), "wide")


@pytest.fixture
def launch(llama: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start an engine on it: ``launch(name, environment, **options)``. All are ended afterwards."""
    from engine import EngineProcess

    with ExitStack() as stack:

        def start(name: str, environment: dict[str, str], **options: Any) -> EngineProcess:
            return stack.enter_context(EngineProcess(llama, tmp_path / f"{name}.log", environment, **options))

        yield start
