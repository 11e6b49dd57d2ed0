"""The example runs as its README says, with real engines, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
DEADLINE_S = 480.0


def test_the_pd_deploy_example_answers_from_remote_kv_and_ends_everything(model: Path, tmp_path: Path):
    env = {**os.environ, "PYTHON": sys.executable, "LOG_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [ROOT / "examples/pd_deploy/run.sh", str(model)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.terminate()
    assert process.returncode == 0, output
    assert "Paris" in output
    assert output.count("pdkv: extended") == 2
    scheduler = json.loads((tmp_path / "status/decode/scheduler.json").read_text())
    assert (scheduler["remote_prefill_hits"], scheduler["recomputed_tokens"]) == (1, 0)
    assert still_running(tmp_path) == []


def still_running(folder: Path) -> list[str]:
    """Command lines of processes whose status files go to `folder`."""
    wanted = f"PDKV_STATUS_DIR={folder}".encode()
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and wanted in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended while we looked, or is another user's
    return found
