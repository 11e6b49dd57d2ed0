"""The rules of :mod:`pdkv.memory.driver` for what leaves a driver: tensors over memory, and descriptors of chunks."""

from __future__ import annotations

import gc
import os
import weakref

from pdkv.errors import DriverError
from pdkv.testing._bench import Bench
from pdkv.testing.rules import allowed, refused, require


def makes_tensors_of_exactly_the_range_without_touching_it(bench: Bench) -> None:
    address, granule = bench.reserve(4), bench.granule
    bench.backed(address + granule, 1, fill=3)
    for offset, nbytes in ((0, 4 * granule), (2 * granule, granule), (granule + 3, 5)):
        tensor = bench.driver.tensor(address + offset, nbytes, object())
        require(tensor.dim() == 1 and str(tensor.dtype) == "torch.int8", "a tensor is one-dimensional and int8")
        require(tensor.numel() == nbytes, f"a tensor of {nbytes} bytes has as many elements")
        storage = tensor.untyped_storage()
        require(storage.data_ptr() == address + offset, "the storage begins at the address")
        require(storage.nbytes() == nbytes, f"the storage spans {nbytes} bytes, not {storage.nbytes()}")
    seen = bench.driver.tensor(address, 4 * granule, object())[granule : 2 * granule]
    require(bool((seen == 3).all()), "a tensor over more than is mapped shows what is mapped")


def keeps_alive_what_a_tensor_needs(bench: Bench) -> None:
    class Owner:
        pass

    owner = Owner()
    died = weakref.ref(owner)
    view = bench.driver.tensor(bench.reserve(2), 2 * bench.granule, owner)[1:].view(-1)
    del owner
    gc.collect()
    require(died() is not None, "keepalive lives as long as any tensor that shares the storage")
    del view
    gc.collect()
    require(died() is None, "keepalive is let go when the last tensor has died")


def exports_descriptors_that_the_caller_owns(bench: Bench) -> None:
    address = bench.reserve(1)
    chunk = bench.backed(address, 1, fill=4)
    require(bench.driver.is_pinned(chunk) in (False, None), "a chunk that was not exported is not pinned")
    try:
        first = bench.driver.export_fd(chunk)
    except DriverError:
        return  # chunks of this driver cannot be exported, which the contract allows
    second = bench.driver.export_fd(chunk)
    try:
        require(first != second, "each export is a descriptor of its own")
        require(bench.driver.is_pinned(chunk) in (True, None), "a chunk with an exported descriptor is pinned")
    finally:
        for fd in {first, second}:
            os.close(fd)
    require(bench.driver.is_pinned(chunk) in (False, None), "a chunk is not pinned when its descriptors are closed")
    bench.require_filled(address, 1, 4)


def imports_what_was_exported(bench: Bench) -> None:
    address, elsewhere = bench.reserve(1), bench.reserve(1)
    chunk = bench.backed(address, 1, fill=5)
    try:
        fd = bench.driver.export_fd(chunk)
    except DriverError:
        return  # chunks of this driver cannot be exported, which the contract allows
    try:
        imported = bench.driver.import_fd(fd, bench.granule)
    except DriverError:
        return  # nor need a driver be able to import
    finally:
        os.close(fd)
    bench.adopt(imported)
    require(imported is not chunk and imported.nbytes == bench.granule, "an imported chunk is one of its own")
    bench.map(elsewhere, imported)
    bench.require_filled(elsewhere, 1, 5)
    bench.view(elsewhere, 1).fill_(6)
    bench.require_filled(address, 1, 6)
    bench.unmap(elsewhere)
    bench.map(elsewhere, imported, read_only=True)
    bench.require_filled(elsewhere, 1, 6)
    with refused("zero of a mapping for reading only", DriverError):
        bench.driver.zero(elsewhere, bench.granule)
    with refused("a copy into a mapping for reading only", DriverError):
        bench.driver.copy(elsewhere, address, 1)
    bench.unmap(address)
    bench.release(chunk)
    with allowed("an importer reads on when the owner has released"):
        bench.require_filled(elsewhere, 1, 6)


SHARING_CHECKS = (
    makes_tensors_of_exactly_the_range_without_touching_it,
    keeps_alive_what_a_tensor_needs,
    exports_descriptors_that_the_caller_owns,
    imports_what_was_exported,
)
