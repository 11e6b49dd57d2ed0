"""What the integration tests share: the demo's model, converted once, and vLLM, imported once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import VARIABLES, EngineProcess
from zygote import Zygote

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model() -> Path:
    """Folder of SmolLM2-135M-Instruct; `PDKV_MODEL` names another copy, else it is converted into ``build/``."""
    from pdkv.harness.model import prepare_model

    folder = Path(os.environ.get("PDKV_MODEL", ROOT / "build" / "models" / "smollm2-135m-instruct"))
    prepare_model(folder)
    return folder


@pytest.fixture(scope="package", autouse=True)
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines are forks of a process that has imported vLLM, where that makes no difference to them."""
    with Zygote(tmp_path_factory.mktemp("zygote") / "log", VARIABLES) as EngineProcess.zygote:
        yield
    EngineProcess.zygote = None
