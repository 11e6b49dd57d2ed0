"""Small JSON files that tell the launcher and the harness what an engine did."""

from __future__ import annotations

import json
import os
import threading
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


class StatusFile:
    """One status file that several parts of a process write: each updates its own keys."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder, self._name = folder, name
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()

    def update(self, values: Mapping[str, Any]) -> None:
        """Set these keys, keep the others, and write the file.

        Raises:
            OSError: as of :func:`write_status`; the keys are set all the same.
        """
        with self._lock:
            self._values.update(values)
            write_status(self._folder, self._name, self._values)
