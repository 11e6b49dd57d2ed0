"""The HIP driver under the contract of all drivers, without an AMD GPU.

`hip_shim.c` is compiled and takes the place of the HIP runtime below the real hip-python, so that every call of the
driver is really made, with hip-python's own conversions. Needs a C compiler (`cc`, or what `CC` names) and hip-python:
without them these tests fail, for nothing else covers the HIP driver.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdkv.testing import DRIVER_CHECKS

pytestmark = pytest.mark.cpu

HERE = Path(__file__).parent
TIMEOUT_S = 120
HIP_CHECKS = (
    "the_granule_is_at_least_2_mib_though_the_runtime_says_4_kib",
    "a_runtime_before_7_12_is_refused_chunks_of_several_sizes_with_the_reason",
    "access_is_granted_to_whole_runs_also_when_a_hole_is_closed",
    "a_refused_access_leaves_nothing_mapped",
    "many_ranges_are_backed_in_one_go_and_waited_for_once",
    "whatever_call_of_many_fails_nothing_is_left_of_them_and_they_can_be_tried_again",
    "memory_that_runs_out_among_many_is_said_to_be_too_little_for_all",
    "more_than_is_free_is_refused_before_it_is_tried",
    "memory_that_runs_out_at_map_is_said_to_have_run_out",
    "the_callers_device_is_current_again_after_each_call",
    "a_device_that_is_not_there_is_refused",
    "without_exportable_chunks_the_driver_works_and_says_so",
    "a_cache_grows_defragments_sleeps_and_wakes",
)


def need_hip_python() -> None:
    if importlib.util.find_spec("hip") is None:
        pytest.fail("these tests need hip-python: pip install hip-python", pytrace=False)


def environment(rocm_path: Path) -> dict[str, str]:
    """Where hip-python looks for the HIP runtime: in ROCM_PATH, and before release 10 where the loader does."""
    libraries = os.pathsep.join(filter(None, [str(rocm_path / "lib"), os.environ.get("LD_LIBRARY_PATH")]))
    return {**os.environ, "ROCM_PATH": str(rocm_path), "LD_LIBRARY_PATH": libraries}


def c_compiler() -> list[str]:
    """`cc`, what `CC` names, or the compiler that set-up installs where a machine has none."""
    named = shutil.which(os.environ.get("CC", "cc"))
    if named is not None:
        return [named]
    if importlib.util.find_spec("ziglang") is None:
        pytest.fail("these tests need a C compiler: run make setup, or install gcc or clang", pytrace=False)
    return [sys.executable, "-m", "ziglang", "cc"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What became of each check: None, or what went wrong."""
    need_hip_python()
    compiler = c_compiler()
    rocm = tmp_path_factory.mktemp("rocm")
    library = rocm / "lib" / "libamdhip64.so"
    library.parent.mkdir()
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*compiler, *flags, "-o", library, HERE / "hip_shim.c"], check=True, timeout=TIMEOUT_S)
    done = subprocess.run(
        [sys.executable, HERE / "hip_over_shim.py", library],
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(rocm),
        check=False,
    )
    results = dict(json.loads(line) for line in done.stdout.splitlines())
    ended = f"the process ended with status {done.returncode} before this check was over"
    return {check: results.get(check, ended) for check in (*DRIVER_CHECKS, *HIP_CHECKS)}


@pytest.mark.parametrize("rule", DRIVER_CHECKS)
def test_the_hip_driver_keeps_the_contract(outcomes: dict[str, str | None], rule: str) -> None:
    if outcomes[rule] is not None:
        pytest.fail(outcomes[rule], pytrace=False)


@pytest.mark.parametrize("check", HIP_CHECKS)
def test_hip(outcomes: dict[str, str | None], check: str) -> None:
    if outcomes[check] is not None:
        pytest.fail(outcomes[check], pytrace=False)


def test_without_a_hip_runtime_the_driver_says_so(tmp_path: Path) -> None:
    need_hip_python()
    program = "from pdkv.memory.hip import HipDriver; HipDriver(0)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(tmp_path),
        check=False,
    )
    assert "DriverUnavailableError: there is no HIP runtime on this machine" in done.stderr
