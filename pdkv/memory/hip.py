"""Memory of an AMD GPU, through `hip-python`: chunks of `hipMemCreate` mapped into ranges of `hipMemAddressReserve`.

How the HIP runtime behaves, beyond what `pdkv.memory._vmm` says of both vendors:

- Before 7.12 `hipMemSetAccess` fails now and then, without a rule that one could follow, once a reservation holds
  chunks of different sizes. Such a runtime is refused that, rather than left to chance.
- It grants access reliably for whole runs of neighbouring mappings. So each grant covers the run that the new mapping
  has become a part of.
- It reports granules down to 4 KiB, at which mapping is slow. 2 MiB is the least here, as on CUDA.

Never run on AMD hardware: every call is made in the tests against a library that implements them over `mmap`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pdkv.errors import DriverError, DriverUnavailableError
from pdkv.memory import _dlpack
from pdkv.memory._vmm import VmmDriver
from pdkv.memory._vmm_api import VmmApi
from pdkv.memory.driver import MemoryInfo, PhysicalChunk

MIN_GRANULE = 2 << 20
"""The least granule in bytes, whatever the runtime reports."""

MIXED_SIZES_VERSION = 71_200_000
"""From 7.12 on a reservation may hold chunks of different sizes. Versions are major * 10^7 + minor * 10^5 + patch."""

# hipMemAllocationProp of hip_runtime_api.h: type, requestedHandleType, location.type, location.id, win32HandleMetaData,
# then allocFlags. The bindings' class leaves out the second field, an anonymous union.
_PROPERTIES = struct.Struct("=iiiiQ8x")


class HipApi(VmmApi):
    """The HIP runtime's calls for one device. See :class:`VmmApi` for what each method does."""

    name = "hip"
    gpu_direct_rdma = False

    def __init__(self, module: Any, device: int) -> None:
        """
        Args:
            module: `hip.hip`, or anything with its functions.
            device: ordinal as torch counts it, that is, after `HIP_VISIBLE_DEVICES`.

        Raises:
            DriverUnavailableError: there is no HIP runtime, no such device, or no virtual memory management on it.
        """
        super().__init__(module)
        self.dlpack_device = (_dlpack.ROCM, device)
        self._device = device
        self._stream: Any = None
        try:
            self.call("hipInit", 0)
        except RuntimeError as error:  # how the bindings say that libamdhip64.so cannot be loaded
            raise DriverUnavailableError(f"there is no HIP runtime on this machine: {error}") from error
        supported = module.hipDeviceAttribute_t.hipDeviceAttributeVirtualMemoryManagementSupported
        if not self.call("hipDeviceGetAttribute", supported, device):
            raise DriverUnavailableError(f"HIP device {device} has no virtual memory management")
        self.version = int(self.call("hipRuntimeGetVersion"))
        with self.on_device():
            self._properties = self._best_properties()
            self._stream = self.call("hipStreamCreateWithFlags", module.hipStreamNonBlocking)
        self._access = module.hipMemAccessDesc()
        self._access.location.type = module.hipMemLocationType.hipMemLocationTypeDevice
        self._access.location.id = device
        self._access.flags = module.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite

    @contextmanager
    def on_device(self) -> Iterator[None]:
        before = self.call("hipGetDevice")
        if before == self._device:
            yield
            return
        self.call("hipSetDevice", self._device)
        try:
            yield
        finally:
            self.call("hipSetDevice", before)

    def granularity(self) -> int:
        minimum = self._module.hipMemAllocationGranularity_flags.hipMemAllocationGranularityMinimum
        return int(self.call("hipMemGetAllocationGranularity", self._properties, minimum))

    def address_reserve(self, nbytes: int, alignment: int) -> int:
        return int(self.call("hipMemAddressReserve", nbytes, alignment, None, 0))

    def address_free(self, address: int, nbytes: int) -> None:
        self.call("hipMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> int:
        return int(self.call("hipMemCreate", nbytes, self._properties, 0, wanted=nbytes))

    def release(self, handle: int) -> None:
        self.call("hipMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self.call("hipMemMap", address, nbytes, 0, handle, 0, wanted=nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self.call("hipMemUnmap", address, nbytes)

    def set_access(self, address: int, nbytes: int) -> None:
        self.call("hipMemSetAccess", address, nbytes, self._access, 1, wanted=nbytes)

    def mapping_at(self, address: int) -> tuple[int, int, int] | None:
        code, handle = self._module.hipMemRetainAllocationHandle(address)
        if int(code) != 0:
            return None
        self.call("hipMemRelease", handle)
        base, nbytes = self.call("hipMemGetAddressRange", address)
        return int(base), int(nbytes), int(handle)

    def export_fd(self, handle: int) -> int:
        fd = array("i", [-1])
        kind = self._module.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor
        self.call("hipMemExportToShareableHandle", fd, handle, kind, 0)
        return fd[0]

    def start_zero(self, address: int, nbytes: int) -> None:
        self.call("hipMemsetD8Async", address, 0, nbytes, self._stream)

    def start_copy(self, destination: int, source: int, nbytes: int) -> None:
        self.call("hipMemcpyDtoDAsync", destination, source, nbytes, self._stream)

    def finish(self) -> None:
        self.call("hipStreamSynchronize", self._stream)

    def synchronize(self) -> None:
        self.call("hipDeviceSynchronize")

    def memory_info(self) -> MemoryInfo:
        free, total = self.call("hipMemGetInfo")
        return MemoryInfo(free=int(free), total=int(total))

    def facts(self) -> dict[str, str | int | bool]:
        return {"runtime_version": self.version}

    def close(self) -> None:
        if self._stream is not None:
            with self.on_device():
                self.call("hipStreamDestroy", self._stream)
            self._stream = None  # later calls use the null stream, which is always there

    def _best_properties(self) -> bytearray:
        """The properties of chunks that can be exported, or else of chunks that cannot; sets what describes them."""
        hip = self._module
        kinds = hip.hipMemAllocationHandleType
        refusals = []
        for name, kind in {
            "posix_fd": kinds.hipMemHandleTypePosixFileDescriptor,
            "none": kinds.hipMemHandleTypeNone,
        }.items():
            properties = bytearray(
                _PROPERTIES.pack(
                    int(hip.hipMemAllocationType.hipMemAllocationTypePinned),
                    int(kind),
                    int(hip.hipMemLocationType.hipMemLocationTypeDevice),
                    self._device,
                    0,
                )
            )
            try:
                self.call("hipMemRelease", self.call("hipMemCreate", MIN_GRANULE, properties, 0, wanted=MIN_GRANULE))
            except DriverError as error:
                refusals.append(f"{name}: {error}")
                continue
            self.handle_type = name
            return properties
        raise DriverUnavailableError(f"HIP device {self._device} grants no kind of chunk: {'; '.join(refusals)}")


class HipDriver(VmmDriver):
    """Memory of one AMD GPU."""

    def __init__(self, device: int = 0, *, api: HipApi | None = None) -> None:
        """
        Args:
            device: ordinal as torch counts it.
            api: the calls to use; by default those of the installed `hip-python`.

        Raises:
            DriverUnavailableError: `hip-python` is not installed, or the device cannot be used; the message says why.
        """
        api = api or _installed_api(device)
        super().__init__(api, device, MIN_GRANULE)
        self._mixed_sizes = api.version >= MIXED_SIZES_VERSION

    def _map_now(self, address: int, chunk: PhysicalChunk, *, read_only: bool = False) -> None:
        self._check_one_size(address, chunk.nbytes)
        super()._map_now(address, chunk, read_only=read_only)

    def _check_one_size(self, address: int, nbytes: int) -> None:
        if self._mixed_sizes:
            return
        others = {size for _, size in self._books.mapped.overlapping(*self._books.reservation_around(address, nbytes))}
        if others - {nbytes}:
            raise DriverError(
                f"a chunk of {nbytes} bytes cannot be mapped beside chunks of {min(others)} bytes: before HIP 7.12"
                " hipMemSetAccess fails at random in a reservation with several chunk sizes; install ROCm 7.12 or"
                " later, or commit in chunks of one size"
            )

    def _access_range(self, address: int, nbytes: int) -> tuple[int, int]:
        start, end = address, address + nbytes
        low, size = self._books.reservation_around(address, nbytes)
        for other, other_nbytes in self._books.mapped.overlapping(end, low + size - end):
            if other != end:
                break
            end += other_nbytes
        for other, other_nbytes in reversed(self._books.mapped.overlapping(low, start - low)):
            if other + other_nbytes != start:
                break
            start = other
        return start, end - start


def _installed_api(device: int) -> HipApi:
    try:
        from hip import hip as module
    except ImportError as error:
        raise DriverUnavailableError(f"hip-python is needed (pip install 'pdkv[hip]'): {error}") from error
    return HipApi(module, device)
