"""How a conformance suite says that a rule was broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdkv.errors import PdkvError


class BrokenRuleError(AssertionError):
    """An implementation does not keep to its contract. The message names the rule and what was seen."""


def require(holds: object, rule: str) -> None:
    """Raise BrokenRuleError with the rule unless it holds."""
    if not holds:
        raise BrokenRuleError(rule)


@contextmanager
def refused(rule: str, error: type[PdkvError] = PdkvError) -> Iterator[None]:
    """The block must raise `error`; anything else, or nothing, breaks the rule."""
    try:
        yield
    except error:
        return
    except Exception as other:
        raise BrokenRuleError(f"{rule}: expected {error.__name__}, got {type(other).__name__}: {other}") from other
    raise BrokenRuleError(f"{rule}: expected {error.__name__}, but nothing was raised")


@contextmanager
def allowed(rule: str) -> Iterator[None]:
    """The block must raise no error of pdkv's."""
    try:
        yield
    except PdkvError as error:
        raise BrokenRuleError(f"{rule}: refused with {type(error).__name__}: {error}") from error
