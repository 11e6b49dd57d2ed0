"""What operators see of a session: its metrics in the engine's status folder, as ``session.json``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from pdkv.transfer import Session
from pdkv_connectors.vllm.status import write_status

logger = init_logger(f"vllm.{__name__}")

#: Between two looks at what has changed, in seconds.
INTERVAL_S = 1.0


class StatusWriter:
    """Writes when something has changed, once in :data:`INTERVAL_S` at most.

    Args:
        folder: None writes nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._due_at = 0.0
        self._written: dict[str, Any] = {}

    def write(self, session: Session) -> None:
        """To be called often."""
        if self._folder is None or time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + INTERVAL_S
        metrics = session.metrics()
        metrics["quarantine_age_s"] = int(metrics["quarantine_age_s"])
        if metrics == self._written:
            return
        self._written = metrics
        try:
            write_status(self._folder, "session", metrics)
        except OSError as error:
            # A full disk must not end an engine that serves; the launcher sees that the file is old.
            logger.error("cannot write the status file session.json to %s: %s", self._folder, error)
