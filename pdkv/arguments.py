"""Command lines of pdkv's programs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn

from pdkv.errors import ConfigError


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, raised as ConfigError, in place of the usage text and an exit.

    Options are never abbreviated: an abbreviation that works today means another option once one is added.
    """

    def __init__(self, **settings: object) -> None:
        super().__init__(allow_abbrev=False, **settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help.")


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written when a run of minutes is over. A missing folder is made now.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_there = os.path.lexists(path)
        # Tried, not asked for: root may do anything by its mode, also in /proc. A pipe without a reader does not wait.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666))
        if not is_there:
            path.unlink()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option} {str(path)!r} cannot be written ({reason}); name another file.") from error
