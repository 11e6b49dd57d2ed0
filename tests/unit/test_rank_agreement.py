"""Two ranks in two processes, over gloo: whoever has less memory decides, before warmup and after it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cpu

pytest.importorskip("torch")

MIB = 1 << 20
_MAIN = Path(__file__).with_name("rank_main.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks said; rank 1 has 20 MiB, rank 0 has 48."""
    meet_at = tmp_path_factory.mktemp("ranks") / "meet"
    processes = [
        subprocess.Popen(
            [sys.executable, str(_MAIN), str(rank), "2", str(meet_at), str(limit)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, limit in enumerate((48 * MIB, 20 * MIB))
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]


def test_the_ranks_warm_up_with_the_smaller_count(ranks: list[dict[str, Any]]) -> None:
    rich, poor = ranks
    assert rich["own_warmup_blocks"] > poor["own_warmup_blocks"]
    assert rich["warmup_blocks"] == poor["warmup_blocks"] == poor["own_warmup_blocks"]


def test_the_ranks_commit_the_smaller_count(ranks: list[dict[str, Any]]) -> None:
    rich, poor = ranks
    assert rich["own_final_blocks"] > poor["own_final_blocks"] > poor["warmup_blocks"]
    for rank in ranks:
        assert rank["committed_blocks"] == rank["agreed_final_blocks"] == poor["own_final_blocks"]
    assert f"Another rank has room for {poor['own_final_blocks']} blocks only" in rich["message"]
    assert "Another rank" not in poor["message"]
