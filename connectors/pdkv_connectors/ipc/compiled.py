"""A Triton kernel compiled once and launched without Triton: 15 µs of the host's time for each launch less."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pdkv.errors import TransportError
from pdkv_connectors.ipc.constants import Constants
from pdkv_connectors.ipc.cuda_calls import CudaCalls, LaunchConfig

THREADS_OF_A_WARP = 32
SUM_WARPS = 8
"""Of `kernels.sum_pages`: a tile of 2048 words is 64 bytes for each of 256 threads."""

_SIZES = {"i32": ctypes.c_int32}


class CompiledKernel:
    """One kernel with its constants, loaded into a device; see :class:`Launch`.

    Needs the device's context to be current, here and in :meth:`close`.
    """

    def __init__(
        self, calls: CudaCalls, kernel: Any, arguments: Mapping[str, str], constants: Constants, warps: int
    ) -> None:
        """
        Args:
            kernel: a function of `kernels`.
            arguments: Triton's type of each argument that is no constant, in order: "*i64", "i32" and so on.
            warps: of each program.

        Raises:
            TransportError: Triton is missing, or cannot compile it for this device.
        """
        self.arguments = tuple(arguments.values())
        self._calls = calls
        compiled = compile_kernel(kernel, arguments, constants, warps, calls.capability())
        self.shared_nbytes = int(compiled.metadata.shared)
        self.threads = int(compiled.metadata.num_warps) * THREADS_OF_A_WARP
        self.num_parameters = _count_parameters(compiled.asm["ptx"])
        self._module, self.function = calls.load_function(compiled.asm["cubin"], compiled.metadata.name)

    def close(self) -> None:
        """Unload it. No launch of it may be running."""
        self._calls.check("cuModuleUnload", self._module)


class Launch:
    """The arguments of one kernel in the form that the driver takes, to be set and launched again and again."""

    def __init__(self, calls: CudaCalls, kernel: CompiledKernel) -> None:
        self._calls = calls
        self._launch = calls.launch
        self._function = kernel.function
        self._config = LaunchConfig(1, 1, 1, kernel.threads, 1, 1, kernel.shared_nbytes)
        self._config_address = ctypes.addressof(self._config)
        kinds: Sequence[Any] = [_SIZES.get(name, ctypes.c_uint64) for name in kernel.arguments]
        # Triton adds pointers to scratch memory, which these kernels do not use.
        self.values = [kind() for kind in kinds] + [
            ctypes.c_uint64() for _ in range(kernel.num_parameters - len(kinds))
        ]
        self._array = (ctypes.c_void_p * len(self.values))(*(ctypes.addressof(value) for value in self.values))
        self._array_address = ctypes.addressof(self._array)

    def __call__(self, programs: int, stream: int) -> None:
        """Launch with the present `values`, which the driver copies.

        Raises:
            TransportError: the driver refused.
        """
        self._config.grid_x = programs
        self._config.stream = stream
        code = self._launch(self._config_address, self._function, self._array_address, None)
        if code:
            self._calls.require(code, "cuLaunchKernelEx")


def compile_kernel(kernel: Any, arguments: Mapping[str, str], constants: Constants, warps: int, capability: int) -> Any:
    """What Triton makes of a kernel; needs no device.

    Args:
        warps: of each program.
        capability: compute capability as Triton writes it: 90 for 9.0.

    Raises:
        TransportError: there is no Triton, it cannot compile the kernel, or the kernel needs scratch memory.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise TransportError(
            f"the ipc transport needs Triton on CUDA, which torch's CUDA builds bring: {error}"
        ) from error
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    pointers = [index for index, kind in enumerate(arguments.values()) if kind.startswith("*")]
    aligned: dict[tuple[int, ...], list[list[object]]] = {(index,): [["tt.divisibility", 16]] for index in pointers}
    try:
        source = ASTSource(kernel, signature, constants, aligned)
        target = GPUTarget("cuda", capability, THREADS_OF_A_WARP)
        compiled = triton.compile(source, target=target, options={"num_warps": warps})
    except Exception as error:
        raise TransportError(f"Triton cannot compile {kernel.__name__} for capability {capability}: {error}") from error
    for scratch in ("global_scratch_size", "profile_scratch_size"):
        if getattr(compiled.metadata, scratch, 0):
            raise TransportError(
                f"Triton compiled {kernel.__name__} so that it needs scratch memory; use another version"
            )
    return compiled


def _count_parameters(ptx: str) -> int:
    """Parameters of the only entry in `ptx`."""
    entry = re.search(r"\.entry[^(]*\((.*?)\)", ptx, re.DOTALL)
    return entry[1].count(".param") if entry else 0
