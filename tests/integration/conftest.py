"""What the integration tests share: the demo's model, converted once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model() -> Path:
    """Folder of SmolLM2-135M-Instruct; `PDKV_MODEL` names another copy, else it is converted into ``build/``."""
    from pdkv.harness.model import prepare_model

    folder = Path(os.environ.get("PDKV_MODEL", ROOT / "build" / "models" / "smollm2-135m-instruct"))
    prepare_model(folder)
    return folder
