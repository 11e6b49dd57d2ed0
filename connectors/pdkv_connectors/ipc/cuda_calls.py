"""The few calls of the CUDA driver that a copy makes, by ctypes: of all ways from Python the one that costs least.

Each takes about a microsecond. They work in the device's primary context, which is torch's and `pdkv.memory`'s too.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

from pdkv.errors import TransportError

NOT_READY = 600
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_HOST_ALLOC_DEVICEMAP = 2
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGet": [c_void_p, c_int],
    "cuDevicePrimaryCtxRetain": [c_void_p, c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxGetCurrent": [c_void_p],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [c_void_p],
    "cuCtxSynchronize": [],
    "cuDeviceGetAttribute": [c_void_p, c_int, c_int],
    "cuMemAlloc_v2": [c_void_p, c_size_t],
    "cuMemFree_v2": [c_void_p],
    "cuMemHostAlloc": [c_void_p, c_size_t, c_uint],
    "cuMemHostGetDevicePointer_v2": [c_void_p, c_void_p, c_uint],
    "cuMemFreeHost": [c_void_p],
    "cuMemcpyHtoDAsync_v2": [c_void_p, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoDAsync_v2": [c_void_p, c_void_p, c_size_t, c_void_p],
    "cuStreamCreate": [c_void_p, c_uint],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuEventCreate": [c_void_p, c_uint],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuModuleLoadData": [c_void_p, c_char_p],
    "cuModuleUnload": [c_void_p],
    "cuModuleGetFunction": [c_void_p, c_void_p, c_char_p],
    "cuLaunchKernelEx": [c_void_p, c_void_p, c_void_p, c_void_p],
    "cuGetErrorName": [c_int, c_void_p],
}
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig: to fill in a field and pass it costs less than a call of eleven arguments."""

    _fields_ = [
        *((f"grid_{axis}", c_uint) for axis in "xyz"),
        *((f"block_{axis}", c_uint) for axis in "xyz"),
        ("shared_nbytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    ]


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"there is no NVIDIA driver on this machine: {error}") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    return library


class _OnDevice:
    """A context manager by hand: a generator's would cost a launch two microseconds."""

    __slots__ = ("_context", "_library", "_pushed")

    def __init__(self, library: Any, context: int) -> None:
        self._library, self._context = library, context
        self._pushed = False

    def __enter__(self) -> None:
        current = c_void_p()
        self._library.cuCtxGetCurrent(byref(current))
        if current.value != self._context:
            self._pushed = self._library.cuCtxPushCurrent_v2(self._context) == 0

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            self._library.cuCtxPopCurrent_v2(byref(c_void_p()))


class CudaCalls:
    """The calls for one device.

    All but :meth:`on_device` and :meth:`has_happened` need its context to be current in the calling thread.
    """

    def __init__(self, device: int) -> None:
        """
        Args:
            device: ordinal as torch counts it.

        Raises:
            TransportError: there is no driver, or no such device.
        """
        self._library = _library()
        self.check("cuInit", 0)
        self._device = int(self._made("cuDeviceGet", device, kind=c_int))
        self._context = self._made("cuDevicePrimaryCtxRetain", self._device)
        #: For the hottest path: no name to look up, no error to format.
        self.copy_to_device = self._library.cuMemcpyHtoDAsync_v2
        self.launch = self._library.cuLaunchKernelEx
        self.record = self._library.cuEventRecord
        self.query = self._library.cuEventQuery

    def check(self, name: str, *arguments: Any) -> None:
        """Call, and raise TransportError where it fails."""
        self.require(getattr(self._library, name)(*arguments), name)

    def require(self, code: int, name: str) -> None:
        """Raise TransportError unless `code` is success."""
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(code, byref(text))
            raise TransportError(f"{name} failed with {(text.value or b'an unknown error').decode()} ({code})")

    def _made(self, name: str, *arguments: Any, kind: Any = c_void_p) -> Any:
        """What a call writes through its first argument."""
        result = kind()
        self.check(name, byref(result), *arguments)
        return result.value

    def on_device(self) -> _OnDevice:
        """Make the device's context current in this thread, and put back what was current before."""
        return _OnDevice(self._library, self._context)

    def capability(self) -> int:
        """Compute capability as Triton writes it: 90 for 9.0."""
        major = self._made("cuDeviceGetAttribute", _COMPUTE_CAPABILITY_MAJOR, self._device, kind=c_int)
        minor = self._made("cuDeviceGetAttribute", _COMPUTE_CAPABILITY_MINOR, self._device, kind=c_int)
        return int(major * 10 + minor)

    def allocate(self, nbytes: int) -> int:
        """Memory of the device, plain."""
        return int(self._made("cuMemAlloc_v2", nbytes))

    def upload(self, data: bytes) -> int:
        """New memory of the device with these contents, there when it returns."""
        address = self.allocate(len(data))
        self.check("cuMemcpyHtoDAsync_v2", address, data, len(data), None)
        self.check("cuStreamSynchronize", None)
        return address

    def free(self, address: int) -> None:
        """Give back what :meth:`allocate` or :meth:`upload` gave."""
        self.check("cuMemFree_v2", address)

    def allocate_shared(self, nbytes: int) -> tuple[int, int]:
        """Pinned memory of the host that kernels reach: its address here and there."""
        host = int(self._made("cuMemHostAlloc", nbytes, _HOST_ALLOC_DEVICEMAP))
        return host, int(self._made("cuMemHostGetDevicePointer_v2", host, 0))

    def free_shared(self, host: int) -> None:
        """Give back what :meth:`allocate_shared` gave."""
        self.check("cuMemFreeHost", host)

    def new_stream(self) -> int:
        """A stream that does not wait for the legacy default stream."""
        return int(self._made("cuStreamCreate", _STREAM_NON_BLOCKING))

    def new_event(self) -> int:
        """An event without a time."""
        return int(self._made("cuEventCreate", _EVENT_DISABLE_TIMING))

    def has_happened(self, event: int) -> bool:
        """Whether all work before the event is done.

        Raises:
            TransportError: that work failed; the context is of no use any more.
        """
        code = self.query(event)
        if code == NOT_READY:
            return False
        self.require(code, "cuEventQuery")
        return True

    def load_function(self, cubin: bytes, name: str) -> tuple[int, int]:
        """(module, function) of a compiled kernel."""
        module = int(self._made("cuModuleLoadData", cubin))
        return module, int(self._made("cuModuleGetFunction", module, name.encode()))

    def close(self) -> None:
        """Let go of the context. Idempotent."""
        if self._context is not None:
            self._context = None
            self.check("cuDevicePrimaryCtxRelease_v2", self._device)
