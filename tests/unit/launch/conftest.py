"""What the launcher's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model to the launcher."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    """Where stand-in engines leave their pids."""
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder
