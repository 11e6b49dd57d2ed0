"""The CUDA driver under the contract of all drivers, and what is CUDA's own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from pdkv.testing import DRIVER_CHECKS, run_driver_check

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.mark.parametrize("rule", DRIVER_CHECKS)
def test_the_cuda_driver_keeps_the_contract(rule: str) -> None:
    from pdkv.memory.cuda import CudaDriver

    run_driver_check(rule, lambda: CudaDriver(0))


def test_describe_says_what_was_granted(driver: Any, record: Any) -> None:
    described = driver.describe()
    record("driver", **described)
    assert described["granule"] == driver.granule >= 2 * MIB
    assert described["handle_type"] in {"fabric+posix_fd", "fabric", "posix_fd", "none"}
    assert isinstance(described["gpu_direct_rdma"], bool)
    chunk = driver.create(driver.granule)
    try:
        if described["exportable"]:
            fd = driver.export_fd(chunk)
            assert os.fstat(fd)
            os.close(fd)
    finally:
        driver.release(chunk)


def test_neighbouring_chunks_are_told_apart(driver: Any) -> None:
    granule = driver.granule
    base = driver.reserve(8 * granule)
    chunks = [driver.create(count * granule) for count in (1, 2, 3)]
    for chunk, offset in zip(chunks, (0, 1, 3), strict=True):
        driver.map(base + offset * granule, chunk)
    found = driver.query_chunks(base, 8 * granule)
    assert [(part.address - base, part.nbytes) for part in found] == [
        (0, granule),
        (granule, 2 * granule),
        (3 * granule, 3 * granule),
    ]
    assert len({part.ident for part in found}) == 3
    assert found == driver.query_chunks(base, 8 * granule), "the same idents at every question"
    assert driver.query_chunks(base + 2 * granule, granule) == found[1:2]
    for part in found:
        driver.unmap(part.address, part.nbytes)
    assert driver.query_chunks(base, 8 * granule) == ()
    for chunk in chunks:
        driver.release(chunk)
    driver.unreserve(base, 8 * granule)


def test_it_works_from_a_thread_that_never_saw_cuda_and_leaves_no_context_there(driver: Any) -> None:
    from cuda.bindings import driver as cu

    seen: list[Any] = []

    def work() -> None:
        try:
            base = driver.reserve(driver.granule)
            chunk = driver.create(driver.granule)
            driver.map(base, chunk)
            driver.zero(base, driver.granule)
            driver.unmap(base, driver.granule)
            driver.release(chunk)
            driver.unreserve(base, driver.granule)
            seen.append(int(cu.cuCtxGetCurrent()[1]))
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [0]


def test_torch_sees_the_memory_that_the_driver_zeroes_and_copies(driver: Any) -> None:
    import torch

    base = driver.reserve(4 * driver.granule)
    chunks = [driver.create(driver.granule) for _ in range(4)]
    for index, chunk in enumerate(chunks):
        driver.map(base + index * driver.granule, chunk)
    view = driver.tensor(base, 4 * driver.granule, object())
    view.copy_(torch.randint(-128, 128, view.shape, dtype=torch.int8, device="cuda"))
    half = 2 * driver.granule
    view[half:].fill_(0)
    driver.copy(base + half, base, half)  # over a chunk border, after work in torch's stream that nobody waited for
    assert torch.equal(view[half:], view[:half])
    kept = view[half + 5 :].clone()
    driver.zero(base + 5, half)  # unaligned, over a border
    assert not view[5 : half + 5].any()
    assert torch.equal(view[half + 5 :], kept)
    assert view[:5].any()
    del view
    for index, chunk in enumerate(chunks):
        driver.unmap(base + index * driver.granule, driver.granule)
        driver.release(chunk)
    driver.unreserve(base, 4 * driver.granule)


def test_what_is_the_callers_can_be_given_back_after_close() -> None:
    from pdkv.memory.cuda import CudaDriver

    driver = CudaDriver(0)
    base = driver.reserve(driver.granule)
    chunk = driver.create(driver.granule)
    driver.map(base, chunk)
    driver.close()
    driver.close()
    driver.unmap(base, driver.granule)
    driver.release(chunk)
    driver.unreserve(base, driver.granule)


def test_a_device_that_is_not_there_is_refused_with_the_reason() -> None:
    from pdkv.errors import DriverUnavailableError
    from pdkv.memory.cuda import CudaDriver

    with pytest.raises(DriverUnavailableError, match="CUDA_ERROR_INVALID_DEVICE"):
        CudaDriver(99)


def test_auto_opens_cuda_here() -> None:
    from pdkv.memory import open_driver

    driver = open_driver("auto")
    assert driver.name == "cuda"
    driver.close()


def test_importing_the_module_imports_neither_torch_nor_the_bindings() -> None:
    program = "import pdkv.memory.cuda, sys; print([m for m in ('torch', 'cuda.bindings.driver') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
