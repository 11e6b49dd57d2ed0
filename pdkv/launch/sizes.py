"""Byte sizes as people write them."""

from __future__ import annotations

import re

from pdkv.errors import ConfigError

# Binary units only: "256MB" means 256e6 to some and 2**28 to others, and a KV budget must not be guessed.
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# 30 digits are more bytes than there are; a longer number overflows in one conversion or another.
_PATTERN = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*")


def parse_nbytes(text: str | int) -> int:
    """The number of bytes in `text`: a plain number, or one with a unit B, KiB, MiB, GiB or TiB (``"256MiB"``).

    Raises:
        ConfigError: the text is no size, or no whole number of bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write bytes as 268435456 or with a unit B, KiB, MiB, GiB, TiB.")
    nbytes = float(match[1]) * _UNITS[match[2]] if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if nbytes != int(nbytes):
        raise ConfigError(f"{text!r} is not a whole number of bytes; choose a smaller unit.")
    return int(nbytes)
