"""Small JSON files that tell the launcher and the harness what an engine did."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_status(folder: Path | None, name: str, values: Mapping[str, Any]) -> None:
    """Replace `folder`/`name`.json as a whole, so that a reader never sees half a file. Does nothing without a folder.

    A status file that cannot be written must not end an engine that serves requests: the caller decides what an
    `OSError` means.
    """
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{os.getpid()}"
    temporary.write_text(json.dumps({"pid": os.getpid(), **values}, indent=1, sort_keys=True) + "\n")
    temporary.replace(folder / f"{name}.json")
