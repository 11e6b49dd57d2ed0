"""Torch tensors over addresses that torch did not allocate, and word of when the last of them has died.

A view must not touch its range (it may have no memory behind it yet), must have a storage of exactly that range, must
keep its owner alive, and must crash nothing however late it dies. DLPack gives all of this on every device: torch takes
address, device and size from the capsule as they stand and asks the driver nothing, where `torch.as_tensor` over
`__cuda_array_interface__` looks up the first address and fails where it is not mapped. DLPack is a C struct; `ctypes`
lays it out here. The struct is that of `dlpack.h`, unversioned, which every torch that pdkv supports reads.

At interpreter exit the order in which objects die is nobody's to choose: a tensor may die after this module's globals,
or after the interpreter itself. So from the beginning of the exit on, the deleters of all living views are null. DLPack
allows that, torch then calls nothing, and owners of views still alive are left to the operating system.
"""

from __future__ import annotations

import atexit
import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Device types of `dlpack.h`.
CPU, CUDA, ROCM = 1, 2, 10

_NAME = b"dltensor"
_INT8 = (0, 8, 1)  # kDLInt, bits, lanes


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _View:
    """What one storage needs for as long as it lives: the struct that torch reads, its arrays, and the owner."""

    def __init__(self, address: int, nbytes: int, device: tuple[int, int], owner: object) -> None:
        self.owner = owner
        self.shape = (ctypes.c_int64 * 1)(nbytes)
        self.strides = (ctypes.c_int64 * 1)(1)
        tensor = _DLTensor(address, *device, 1, *_INT8, self.shape, self.strides, 0)
        self.struct = _DLManagedTensor(tensor, None, None if _exiting else ctypes.cast(_deleter, ctypes.c_void_p))
        self.address = ctypes.addressof(self.struct)


_views: dict[int, _View] = {}
_exiting = False


def _forget(struct: int) -> None:
    """Called by torch, on any thread, when the last tensor over a storage has died."""
    _views.pop(struct, None)


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)


@atexit.register
def _leave_views_alone() -> None:
    """Make every living view harmless: nothing is called when it dies, and what it reads stays where it is."""
    global _exiting
    _exiting = True
    for view in tuple(_views.values()):
        view.struct.deleter = None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(view))


def int8_view(address: int, nbytes: int, device: tuple[int, int], owner: object) -> torch.Tensor:
    """A one-dimensional int8 tensor whose storage is exactly `nbytes` from `address`.

    Args:
        device: DLPack's device type and number.
        owner: kept alive until the last tensor that shares the storage has died.
    """
    from torch.utils.dlpack import from_dlpack

    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    view = _View(address, nbytes, device, owner)
    _views[view.address] = view
    try:
        tensor: torch.Tensor = from_dlpack(new_capsule(view.address, _NAME, None))
    except BaseException:
        _views.pop(view.address, None)
        raise
    return tensor


def live_views() -> int:
    """How many storages made here are alive."""
    return len(_views)
