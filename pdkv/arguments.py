"""Command lines of pdkv's programs, and the numbers in them and in environment variables."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
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


#: More than any count, size or rate there is; sums of a few such numbers still fit what they are computed in.
LARGEST = 10**18
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,30}\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """Which numbers an option or a variable may have. None of them is infinite, nor "not a number".

    As ``type=`` of an option: called with its text it returns the number, and raises ArgumentTypeError for any other.

    Attributes:
        whole: whether it is an int.
        above, least, most: its bounds; `above` is itself not allowed.
    """

    whole: bool = False
    above: float | None = None
    least: float | None = None
    most: float = LARGEST

    @property
    def wanted(self) -> str:
        """What it must be, in words."""
        bounds = [f"above {self.above:g}"] if self.above is not None else []
        bounds += [f"of at least {self.least:g}"] if self.least is not None else []
        bounds += [f"at most {self.most:g}"] if self.most != LARGEST else []
        return " ".join(["a whole number" if self.whole else "a number", " and ".join(bounds)]).rstrip()

    def __call__(self, text: str) -> float:
        try:
            return self._parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {self.wanted}") from error

    def of_variable(self, environment: Mapping[str, str], name: str) -> float | None:
        """The number in an environment variable; None where it is not set, or empty.

        Raises:
            ConfigError: it is something else.
        """
        text = environment.get(name)
        if not text:
            return None
        try:
            return self._parse(text)
        except ValueError:
            raise ConfigError(f"{name} must be {self.wanted}, found {text!r}; correct it or unset it.") from None

    def _parse(self, text: str) -> float:
        if self.whole and not _WHOLE.fullmatch(text):  # int() takes other scripts' digits, and thousands of them
            raise ValueError
        value = int(text) if self.whole else float(text)
        least = -self.most if self.least is None else self.least
        if not least <= value <= self.most or (self.above is not None and value <= self.above):
            raise ValueError
        return value


#: A count: of tokens, blocks, requests, repetitions.
COUNT = Number(whole=True, least=1)
#: A count of which there may be none, and a seed.
NATURAL = Number(whole=True, least=0)
#: What must be more than nothing: a rate, a size that need not be whole.
POSITIVE = Number(above=0)
#: What may be nothing as well.
NOT_NEGATIVE = Number(least=0)
#: A share of something, of which all is allowed and nothing is not.
SHARE = Number(above=0, most=1)
#: Seconds or minutes that a program may run or wait: up to 30 days, which every clock and every wait can count.
SECONDS = Number(above=0, most=30 * 86_400)
MINUTES = Number(above=0, most=30 * 1_440)


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
