"""Where there are no kernels: slices and numpy do the same, and it is said once, with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from pdkv_connectors import native
from pdkv_connectors.native import compiled, find_kernels

pytestmark = pytest.mark.cpu

#: A process without llvmlite reads a block between two transports of its own, and says how.
READ = """
import logging, sys

sys.modules["llvmlite"] = None  # as if it were not installed
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)

from pdkv.testing.transports.side import TransportSide
from pdkv_connectors.ipc import IpcTransport

p, d = TransportSide(IpcTransport), TransportSide(IpcTransport)
for name, seed, side in (("P", 1, p), ("D", 2, d)):
    side.do_open()
    side.do_build(8192)
    side.do_fill(seed)
    side.do_register(name, 1)
d.do_connect("P", 1, p.do_describe())
read = d.do_post("P", 1, [[0, 3, 5]], reads=True)
print("state", d.do_wait(read, 20.0), [side.transport.describe_state()["below"] for side in (p, d)])
print("differing", d.do_differing(2, {"5": [1, 3]}))
for side in (d, p):
    side.do_finish()
"""


def test_without_llvmlite_blocks_are_read_by_slices_which_is_logged_once_with_the_cure() -> None:
    found = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert "state done ['memoryview', 'memoryview']" in lines
    assert "differing []" in lines
    (said,) = [line for line in lines if line.startswith("LOG") and "kernels" in line]
    assert "pip install 'pdkv[host]'" in said


def test_kernels_that_do_not_compile_are_done_without_which_is_logged_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "kernels.ll"
    broken.write_text("define void @copy_runs(ptr %to) {")
    monkeypatch.setattr(compiled, "TEXT", broken)
    monkeypatch.setattr(native, "_found", [])
    assert [find_kernels(), find_kernels()] == [None, None]
    (record,) = caplog.records
    assert "see whether llvmlite works" in record.message
    assert "parsing error" in record.message
    assert "\n" not in record.message


def test_a_llvmlite_that_is_too_old_is_done_without_which_is_logged_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(llvm, "llvm_version_info", (15, 0, 7))
    monkeypatch.setattr(native, "_found", [])
    assert find_kernels() is None
    (record,) = caplog.records
    assert "llvmlite brings LLVM 15.0.7, and 20 is needed" in record.message
    assert "pip install 'pdkv[host]'" in record.message


def test_an_llvmlite_with_another_api_is_done_without_which_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(llvm, "create_mcjit_compiler")
    monkeypatch.setattr(native, "_found", [])
    assert find_kernels() is None
    (record,) = caplog.records
    assert "create_mcjit_compiler" in record.message
    assert "see whether llvmlite works" in record.message
