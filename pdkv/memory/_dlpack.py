"""Torch tensors over addresses that torch did not allocate, and word of when the last of them has died.

A view must not touch its range (it may have no memory behind it yet), must have a storage of exactly that range, must
keep its owner alive, and must crash nothing however late it dies. DLPack gives all of this on every device: torch takes
address, device and size from the capsule as they stand and asks the driver nothing, where `torch.as_tensor` over
`__cuda_array_interface__` looks up the first address and fails where it is not mapped. DLPack is a C struct; `ctypes`
lays it out here. The struct is that of `dlpack.h`, unversioned, which every torch that pdkv supports reads.

numpy makes the struct, over an array that never looks at its address either, and the device is written into it
afterwards. What that is for is numpy's deleter. Torch calls it wherever the last tensor happens to die, which may be in
the middle of an exception, as in ``view[out_of_range]`` of a view that nobody else holds. A deleter in Python, by
`ctypes`, is a call then that begins and ends with an exception set: the interpreter takes that for a fault of the call,
and the caller gets a SystemError in place of the exception. numpy's is compiled and takes references off, nothing else;
what Python runs because of them, finalizers and callbacks of weak references, has the exception laid aside by the
interpreter.

At interpreter exit the order in which objects die is nobody's to choose: a tensor may die after this module's globals,
or after the interpreter itself. So from the beginning of the exit on, the deleters of all living views are null. DLPack
allows that, torch then calls nothing, and owners of views still alive are left to the operating system.
"""

from __future__ import annotations

import atexit
import ctypes
import operator
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    import torch

#: Device types of `dlpack.h`.
CPU, CUDA, ROCM = 1, 2, 10

_NAME = b"dltensor"


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
    """What one storage lives on: numpy's array holds it, and the struct, until torch calls the deleter, the array."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.struct: _DLManagedTensor | None = None
        self.__array_interface__ = {"version": 3, "typestr": "|i1", "shape": (nbytes,), "data": (address, False)}

    def capsule(self, device: tuple[int, int]) -> object:
        """A capsule over the range on a device."""
        import numpy as np

        capsule: object = np.asarray(self).__dlpack__()
        struct = self.struct = _DLManagedTensor.from_address(_pointer_of(capsule, _NAME))
        struct.dl_tensor.device_type, struct.dl_tensor.device_id = device
        if _exiting:
            struct.deleter = None
        return capsule


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)

_views: set[ref[_View]] = set()
_exiting = False


@atexit.register
def _leave_views_alone() -> None:
    """Make every living view harmless: nothing is called when it dies, and what it reads stays where it is."""
    global _exiting
    _exiting = True
    # A struct is gone a moment before its view is. So no other thread may run between looking for a view and writing to
    # its struct: the interpreter changes threads after a call in a bytecode, or when a loop turns back, and there is
    # neither; and nothing dies there, since the view before was let go of.
    for view in map(operator.call, tuple(_views)):
        if view is not None and view.struct is not None:
            view.struct.deleter = None
        del view


def int8_view(address: int, nbytes: int, device: tuple[int, int], owner: object) -> torch.Tensor:
    """A one-dimensional int8 tensor whose storage is exactly `nbytes` from `address`.

    Args:
        device: DLPack's device type and number.
        owner: kept alive until the last tensor that shares the storage has died.
    """
    from torch.utils.dlpack import from_dlpack

    view = _View(address, nbytes, owner)
    _views.add(ref(view, _views.discard))
    tensor: torch.Tensor = from_dlpack(view.capsule(device))
    return tensor


def live_views() -> int:
    """How many storages made here are alive."""
    return len(_views)
