"""Small JSON files that tell the launcher and the harness what an engine did."""

from __future__ import annotations

import errno
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
    content = json.dumps({"pid": os.getpid(), **values}, indent=1, sort_keys=True) + "\n"
    replace_file(f"{folder}/{name}.json", content.encode())


def replace_file(path: str, content: bytes) -> None:
    """Write a file under another name, then give it its own. By few calls, since schedulers do it in their steps.

    Raises:
        OSError: it cannot be written, or not whole; the file that was there stays.
    """
    temporary = f"{path}.{os.getpid()}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        if os.write(file, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
    finally:
        os.close(file)
    os.replace(temporary, path)


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
