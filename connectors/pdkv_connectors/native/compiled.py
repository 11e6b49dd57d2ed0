"""The kernels of kernels.ll, compiled for the CPU at hand by llvmlite, in a tenth of a second."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
"""One axis, contiguous."""

TEXT = Path(__file__).with_name("kernels.ll")
OLDEST_LLVM = (20,)
"""Of llvmlite 0.45. Those before take another language for pointers, constants and passes."""


@dataclass(frozen=True, slots=True)
class UnitShape:
    """What the units of a call look like, on the side that is read and the side that is written. Strides in bytes.

    Attributes:
        heads, granules, rows: heads of a unit, granules of each of them, rows of each granule.
        nbytes: of a row, which is one run on both sides; a multiple of 8 where units are summed.
        table_head: in the table of sums, from one head to the next; the granules of a head follow each other.
    """

    heads: int
    from_head: int
    to_head: int
    table_head: int
    granules: int
    from_granule: int
    to_granule: int
    rows: int
    from_row: int
    to_row: int
    nbytes: int

    def numbers(self, *, sums: bool = True) -> Numbers:
        """As the kernels read it: what follows each other on both sides is one row.

        Args:
            sums: whether the kernel sums, so that granules and heads must stay what they are.
        """
        loops = [
            [self.heads, self.from_head, self.to_head],
            [self.granules, self.from_granule, self.to_granule],
            [self.rows, self.from_row, self.to_row],
        ]
        nbytes = self.nbytes
        joinable = loops[2:] if sums else loops
        while (loop := next((one for one in joinable if one[0] > 1 and one[1] == one[2] == nbytes), None)) is not None:
            nbytes *= loop[0]
            loop[0] = 1
        heads, granules, rows = loops
        return np.array([*heads, self.table_head, *granules, *rows, nbytes], np.int64)


class Kernels:
    """All of them. A call does not hold the interpreter's lock; addresses are of memory that somebody keeps mapped.

    Args:
        cpu, features: what to compile for, as LLVM calls it; the CPU at hand unless told.

    Raises:
        ImportError: llvmlite is missing, or too old for what is in kernels.ll.
        RuntimeError: LLVM does not compile them for this CPU.
    """

    def __init__(self, cpu: str | None = None, features: str = "") -> None:
        import llvmlite.binding as llvm

        if llvm.llvm_version_info < OLDEST_LLVM:
            found = ".".join(map(str, llvm.llvm_version_info))
            raise ImportError(f"llvmlite brings LLVM {found}, and {OLDEST_LLVM[0]} is needed")
        module, machine = optimized(cpu, features)
        self._engine = llvm.create_mcjit_compiler(module, machine)  # owns the code
        self._engine.finalize_object()
        self._copy_runs = self._function("copy_runs", None, 5)
        self._copy_units = self._function("copy_units", None, 5)
        self._copy_and_check_units = self._function("copy_and_check_units", ctypes.c_int64, 7)
        self._sum_units = self._function("sum_units", None, 5)

    def copy_runs(self, to: Numbers, from_: Numbers, nbytes: Numbers, *, streams: bool) -> None:
        """Copy ``nbytes[i]`` bytes from address ``from_[i]`` to ``to[i]``; no two overlap.

        Args:
            streams: write past the caches.
        """
        self._copy_runs(to.ctypes.data, from_.ctypes.data, nbytes.ctypes.data, len(nbytes), streams)

    def copy_units(self, to: Numbers, from_: Numbers, shape: Numbers, *, streams: bool) -> None:
        """Copy units at these addresses.

        Args:
            shape: of :meth:`UnitShape.numbers`.
        """
        self._copy_units(to.ctypes.data, from_.ctypes.data, len(to), shape.ctypes.data, streams)

    def copy_and_check_units(
        self, to: Numbers, from_: Numbers, keys: Numbers, sums: Numbers, shape: Numbers, *, streams: bool
    ) -> int | None:
        """The same, and the sums of the very words that are written are compared: the first unit that differs, or None.

        Args:
            keys: addresses of the keys of the words at `from_`, which lie as these do; see `hashing.word_keys`.
            sums: addresses of the first sum of each unit.
        """
        wrong = self._copy_and_check_units(
            to.ctypes.data,
            from_.ctypes.data,
            keys.ctypes.data,
            sums.ctypes.data,
            len(to),
            shape.ctypes.data,
            streams,
        )
        return int(wrong) if wrong < len(to) else None

    def sum_units(self, from_: Numbers, keys: Numbers, sums: Numbers, shape: Numbers) -> None:
        """Write the sums of units to the places in `sums`. Arguments as above; the strides of `to` mean nothing."""
        self._sum_units(from_.ctypes.data, keys.ctypes.data, sums.ctypes.data, len(from_), shape.ctypes.data)

    def _function(self, name: str, result: Any, arguments: int) -> Any:
        kind = ctypes.CFUNCTYPE(result, *[ctypes.c_int64] * arguments)
        return kind(self._engine.get_function_address(name))


def optimized(cpu: str | None = None, features: str = "") -> tuple[Any, Any]:
    """LLVM's module of the kernels, and the machine that it is for; arguments and errors as of :class:`Kernels`."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if cpu is None:
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    module = llvm.parse_assembly(TEXT.read_text())
    module.triple = llvm.get_process_triple()
    module.verify()
    machine = llvm.Target.from_triple(module.triple).create_target_machine(cpu=cpu, features=features, opt=2)
    # What is worth vectors is written in vectors.
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return module, machine
