"""Command lines of pdkv's programs."""

from __future__ import annotations

import argparse
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
