"""Memory of an NVIDIA GPU, through `cuda-bindings`: `cuMemCreate`d chunks in `cuMemAddressReserve`d ranges.

How the CUDA driver behaves, beyond what `pdkv.memory._vmm` says of both vendors:

- Attributes promise handle types that `cuMemCreate` then refuses (FABRIC on a machine without an IMEX channel fails
  with `CUDA_ERROR_NOT_PERMITTED`). So the best kind of chunk is found by creating one of each kind, best first.
- Network cards reach a chunk only if it was created with `gpuDirectRDMACapable`.
- torch works in the device's primary context. This driver retains the same one, so that addresses mean the same to
  both, and makes it current for each call and no longer: the thread may be any, and may be at work on another device.

`cuda-bindings` is imported when a driver is opened, not with this module. torch's CUDA builds require the
`cuda-bindings` of their own CUDA major version, so that installing both leaves one that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from pdkv.errors import DriverError, DriverUnavailableError, OutOfMemoryError
from pdkv.memory import _dlpack
from pdkv.memory._vmm import VmmDriver
from pdkv.memory._vmm_api import VmmApi
from pdkv.memory.driver import MemoryInfo


class _HandleType(IntEnum):
    """Combinations of `CUmemAllocationHandleType`, best first. The bindings have no name for a combination."""

    FABRIC_AND_POSIX_FD = 0x8 | 0x1
    FABRIC = 0x8
    POSIX_FD = 0x1
    NONE = 0x0


_HANDLE_NAMES = {
    _HandleType.FABRIC_AND_POSIX_FD: "fabric+posix_fd",
    _HandleType.FABRIC: "fabric",
    _HandleType.POSIX_FD: "posix_fd",
    _HandleType.NONE: "none",
}


class CudaApi(VmmApi):
    """The CUDA driver's calls for one device. See :class:`VmmApi` for what each method does."""

    name = "cuda"

    def __init__(self, module: Any, device: int) -> None:
        """
        Args:
            module: `cuda.bindings.driver`.
            device: ordinal as torch counts it, that is, after `CUDA_VISIBLE_DEVICES`.

        Raises:
            DriverUnavailableError: there is no NVIDIA driver, no such device, or no virtual memory management on it.
        """
        super().__init__(module)
        try:
            self.call("cuInit", 0)
        except RuntimeError as error:  # how the bindings say that libcuda.so.1 cannot be loaded
            raise DriverUnavailableError(f"there is no NVIDIA driver on this machine: {error}") from error
        self._device = self.call("cuDeviceGet", device)
        self.dlpack_device = (_dlpack.CUDA, device)
        if not self._attribute("CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            raise DriverUnavailableError(f"CUDA device {device} has no virtual memory management")
        self._context: Any = self.call("cuDevicePrimaryCtxRetain", self._device)
        self._stream: Any = None
        try:
            with self.on_device():
                self._stream = self.call("cuStreamCreate", module.CUstream_flags.CU_STREAM_NON_BLOCKING)
                self._properties = self._best_properties(device)
                self._access = self._access_descriptor(module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def on_device(self) -> Iterator[None]:
        context = self._context
        if context is None:  # closed, and somebody unmaps or releases what is theirs
            context = self.call("cuDevicePrimaryCtxRetain", self._device)
        try:
            if int(self.call("cuCtxGetCurrent")) == int(context):
                yield
                return
            self.call("cuCtxPushCurrent", context)
            try:
                yield
            finally:
                self.call("cuCtxPopCurrent")
        finally:
            if self._context is None:
                self.call("cuDevicePrimaryCtxRelease", self._device)

    def granularity(self) -> int:
        return self._granularity(self._properties)

    def address_reserve(self, nbytes: int, alignment: int) -> int:
        return int(self.call("cuMemAddressReserve", nbytes, alignment, 0, 0))

    def address_free(self, address: int, nbytes: int) -> None:
        self.call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> int:
        return int(self.call("cuMemCreate", nbytes, self._properties, 0, wanted=nbytes))

    def release(self, handle: int) -> None:
        self.call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self.call("cuMemMap", address, nbytes, 0, handle, 0, wanted=nbytes)

    def set_read_access(self, address: int, nbytes: int) -> None:
        access = self._access_descriptor(self._module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
        self.call("cuMemSetAccess", address, nbytes, access, 1, wanted=nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self.call("cuMemUnmap", address, nbytes)

    def set_access(self, address: int, nbytes: int) -> None:
        self.call("cuMemSetAccess", address, nbytes, self._access, 1, wanted=nbytes)

    def mapping_at(self, address: int) -> tuple[int, int, int] | None:
        # Asked first: in a reservation only this call tells a mapped address from one that is merely reserved.
        code, handle = self._module.cuMemRetainAllocationHandle(address)
        if int(code) != 0:
            return None
        self.call("cuMemRelease", handle)
        base, nbytes = self.call("cuMemGetAddressRange", address)
        return int(base), int(nbytes), int(handle)

    def export_fd(self, handle: int) -> int:
        kind = self._module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(self.call("cuMemExportToShareableHandle", handle, kind, 0))

    def import_fd(self, fd: int) -> int:
        kind = self._module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(self.call("cuMemImportFromShareableHandle", fd, kind))

    def start_zero(self, address: int, nbytes: int) -> None:
        self.call("cuMemsetD8Async", address, 0, nbytes, self._stream_now())

    def start_copy(self, destination: int, source: int, nbytes: int) -> None:
        self.call("cuMemcpyDtoDAsync", destination, source, nbytes, self._stream_now())

    def finish(self) -> None:
        self.call("cuStreamSynchronize", self._stream_now())

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")

    def memory_info(self) -> MemoryInfo:
        free, total = self.call("cuMemGetInfo")
        return MemoryInfo(free=int(free), total=int(total))

    def facts(self) -> dict[str, str | int | bool]:
        name = self.call("cuDeviceGetName", 256, self._device)
        return {
            "device_name": bytes(name).split(b"\0")[0].decode(errors="replace"),
            "driver_version": int(self.call("cuDriverGetVersion")),
        }

    def close(self) -> None:
        if self._context is None:
            return
        if self._stream is not None:
            with self.on_device():
                self.call("cuStreamDestroy", self._stream)
            self._stream = None
        self._context = None
        self.call("cuDevicePrimaryCtxRelease", self._device)

    # -- what kind of chunk, and for whom

    def _attribute(self, name: str) -> int:
        return int(self.call("cuDeviceGetAttribute", getattr(self._module.CUdevice_attribute, name), self._device))

    def _granularity(self, properties: Any) -> int:
        minimum = self._module.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", properties, minimum))

    def _best_properties(self, device: int) -> Any:
        """The properties of the best kind of chunk that the driver really creates; sets what describes it.

        Raises:
            OutOfMemoryError: not even one granule is free, so nothing can be tried.
            DriverUnavailableError: no kind of chunk was granted.
        """
        rdma = self._attribute("CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
        refusals = []
        for handle_type in _HandleType:
            for rdma_flag in (1, 0) if rdma else (0,):
                properties = self._chunk_properties(device, handle_type, rdma_flag)
                try:
                    self.gpu_direct_rdma = self._try(properties)
                except OutOfMemoryError:
                    raise
                except DriverError as error:
                    refusals.append(f"{_HANDLE_NAMES[handle_type]}: {error}")
                    continue
                self.handle_type = _HANDLE_NAMES[handle_type]
                return properties
        raise DriverUnavailableError(f"CUDA device {device} grants no kind of chunk: {'; '.join(refusals)}")

    def _try(self, properties: Any) -> bool:
        """Create one granule and let go of it. Returns whether network cards could have reached it."""
        nbytes = self._granularity(properties)
        handle = self.call("cuMemCreate", nbytes, properties, 0, wanted=nbytes)
        try:
            granted = self.call("cuMemGetAllocationPropertiesFromHandle", handle)
            return bool(granted.allocFlags.gpuDirectRDMACapable)
        finally:
            self.call("cuMemRelease", handle)

    def _chunk_properties(self, device: int, handle_type: _HandleType, rdma_flag: int) -> Any:
        cu = self._module
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        properties.requestedHandleTypes = handle_type
        properties.allocFlags.gpuDirectRDMACapable = rdma_flag
        return properties

    def _access_descriptor(self, flags: Any) -> list[Any]:
        cu = self._module
        access = cu.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = flags
        return [access]

    def _stream_now(self) -> Any:
        """The driver's own stream; after `close` the legacy default stream, which is always there."""
        return self._stream if self._stream is not None else 0


class CudaDriver(VmmDriver):
    """Memory of one NVIDIA GPU."""

    def __init__(self, device: int = 0) -> None:
        """
        Args:
            device: ordinal as torch counts it.

        Raises:
            DriverUnavailableError: `cuda-bindings` is missing, or the device cannot be used; the message says why.
            OutOfMemoryError: not even one granule is free.
        """
        try:
            from cuda.bindings import driver as module
        except ImportError as error:
            raise DriverUnavailableError(f"cuda-bindings is needed (pip install 'pdkv[cuda]'): {error}") from error
        super().__init__(CudaApi(module, device), device)
