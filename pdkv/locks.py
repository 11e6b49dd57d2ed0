"""A folder that one process at a time may use: a file that is locked while its holder lives, with the holder's pid.

The kernel lets go of the lock when the process ends, however it ends, so that none is ever stale. The file stays.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from pdkv.errors import StateError

ENGINE_LOCK = "engine.lock"


class FolderLock:
    """Holds a folder from :meth:`take` until it is released, collected, or its process ends."""

    def __init__(self, folder: Path, name: str = ENGINE_LOCK) -> None:
        self.path = folder / name
        self._file: BinaryIO | None = None

    def take(self, user: str = "engine") -> None:
        """Take the folder, made where it is missing. `user` is the word for whoever has one, in the error.

        Raises:
            StateError: it is held, by another process or another lock of this one.
            OSError: the folder or the file cannot be made.
        """
        if self._file is not None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file: BinaryIO = self.path.open("a+b")
        if not _lock(file, fcntl.LOCK_EX):
            pid = _pid_in(file)
            file.close()
            raise StateError(
                f"another {user} (pid {pid}) uses the folder {self.path.parent} and would overwrite what this one "
                "writes there; end it, or give each a folder of its own."
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        self._file = file

    def release(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def held_by(folder: Path, name: str = ENGINE_LOCK) -> str | None:
    """The pid of the process that holds `folder`, or None where nobody does."""
    try:
        with (folder / name).open("rb") as file:
            return None if _lock(file, fcntl.LOCK_SH) else _pid_in(file)
    except FileNotFoundError:
        return None


def _lock(file: BinaryIO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid_in(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(32).decode(errors="replace").strip() or "unknown"
