"""The calls that `pdkv.memory._vmm.VmmDriver` needs of a GPU vendor's driver, and what its errors become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from pdkv.errors import DriverError, DriverUnavailableError, OutOfMemoryError
from pdkv.memory.driver import MemoryInfo

# Names of error codes, as cuda.h and hip_runtime_api.h spell them.
_OUT_OF_MEMORY = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "hipErrorOutOfMemory", "hipErrorMemoryAllocation"})
_UNAVAILABLE = frozenset(
    {
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "CUDA_ERROR_INVALID_DEVICE",
        "CUDA_ERROR_NOT_INITIALIZED",
        "CUDA_ERROR_NO_DEVICE",
        "CUDA_ERROR_STUB_LIBRARY",
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "hipErrorDeinitialized",
        "hipErrorInsufficientDriver",
        "hipErrorInvalidDevice",
        "hipErrorNoDevice",
        "hipErrorNotInitialized",
    }
)


def error_from(call: str, code: str, wanted: int, free: Callable[[], int]) -> DriverError:
    """The one place that turns a vendor's error code into an exception of pdkv.

    Args:
        call: the vendor's function that failed.
        code: the error's symbolic name.
        wanted: bytes of physical memory that the call was to provide; 0 where it provides none.
        free: asks the driver how many bytes are free now.
    """
    if code in _OUT_OF_MEMORY and wanted:
        left = free()
        return OutOfMemoryError(
            f"{call} found no memory for {wanted} bytes, {left} bytes are free ({code}); commit fewer blocks, or free"
            " memory first (torch keeps what it freed until torch.cuda.empty_cache())",
            wanted=wanted,
            free=left,
        )
    if code in _UNAVAILABLE:
        return DriverUnavailableError(f"the device cannot be used: {call} failed with {code}")
    return DriverError(f"{call} failed with {code}")


class VmmApi(ABC):
    """One vendor's calls, over integers. Each raises what :func:`error_from` makes of the vendor's error code."""

    #: "cuda" or "hip".
    name: str
    #: DLPack's device type and number for memory of this device.
    dlpack_device: tuple[int, int]
    #: Which handles chunks can be exported by, as the driver really granted them: "fabric+posix_fd", "none" and so on.
    handle_type: str
    #: Whether chunks were granted with the flag that lets network cards reach them.
    gpu_direct_rdma: bool

    def __init__(self, module: Any) -> None:
        self._module = module

    def call(self, function: str, *arguments: object, wanted: int = 0) -> Any:
        """Call the bindings' `function` and return what follows the error code in its result: nothing, one, or a tuple.

        Both vendors' bindings return a tuple that begins with a member of an integer enumeration, 0 for success.
        """
        try:
            result = getattr(self._module, function)(*arguments)
        except ValueError as error:  # a runtime newer than its bindings may return a code that they have no name for
            raise DriverError(f"{function} failed: {error}") from error
        if result[0]:
            raise error_from(function, str(result[0].name), wanted, lambda: self.memory_info().free)
        return result[1] if len(result) == 2 else result[1:]

    @abstractmethod
    def on_device(self) -> AbstractContextManager[None]:
        """Make the device the calling thread's current one, and put back what was current before."""

    @abstractmethod
    def granularity(self) -> int:
        """Smallest chunk in bytes, for chunks of the kind that was granted."""

    @abstractmethod
    def address_reserve(self, nbytes: int, alignment: int) -> int: ...

    @abstractmethod
    def address_free(self, address: int, nbytes: int) -> None: ...

    @abstractmethod
    def create(self, nbytes: int) -> int:
        """A new chunk's handle."""

    @abstractmethod
    def release(self, handle: int) -> None: ...

    @abstractmethod
    def map(self, address: int, nbytes: int, handle: int) -> None: ...

    @abstractmethod
    def unmap(self, address: int, nbytes: int) -> None: ...

    @abstractmethod
    def set_access(self, address: int, nbytes: int) -> None:
        """Let the owning device read and write the range."""

    @abstractmethod
    def mapping_at(self, address: int) -> tuple[int, int, int] | None:
        """(address, nbytes, handle) of the mapping that holds `address`, or None where there is none.

        The handle is only a number to compare: no reference to it is kept.
        """

    @abstractmethod
    def export_fd(self, handle: int) -> int: ...

    def set_read_access(self, address: int, nbytes: int) -> None:
        """Let the owning device read the range, and not write."""
        raise DriverError(f"the {self.name} driver has no mappings for reading only here")

    def import_fd(self, fd: int) -> int:
        """The handle of a chunk that another process exported."""
        raise DriverError(f"the {self.name} driver maps no chunks of other processes here")

    @abstractmethod
    def start_zero(self, address: int, nbytes: int) -> None:
        """Fill with zero bytes, on the driver's own stream."""

    @abstractmethod
    def start_copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy within the device, on the driver's own stream."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for what was started on the driver's own stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that was started on the device in this process."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo: ...

    @abstractmethod
    def facts(self) -> dict[str, str | int | bool]:
        """Names and versions for :meth:`MemoryDriver.describe`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the stream and of the device. Idempotent."""
