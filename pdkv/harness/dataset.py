"""Word problems in GSM8K's JSON-lines format, and the answers in them.

One object a line: ``{"question": ..., "answer": ...}``. The answer is a rationale in which calculations are annotated
(``<<48/2=24>>``) and whose last line is ``#### N``. Format: Cobbe et al., "Training Verifiers to Solve Math Word
Problems", 2021, and its repository, openai/grade-school-math.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from pdkv.errors import ConfigError

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem; `number` counts from 1 in the order of the file."""

    number: int
    question: str
    answer: str

    @property
    def expected(self) -> Decimal:
        """The number behind ``####``."""
        found = marked_answer(self.answer)
        if found is None:
            raise ConfigError(f"the answer of problem {self.number} has no '#### N'.")
        return found


def load_problems(path: Path, limit: int | None = None) -> tuple[Problem, ...]:
    """The first `limit` problems of a file, or all of them.

    Raises:
        ConfigError: the file cannot be read, holds no problem, or a line is malformed; the message names the line.
    """
    try:
        # Not splitlines: a JSON text may hold U+2028 and other ends of lines as they are. Some tools write a BOM.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(
            f"cannot read the data set {path} ({error.strerror}); name a file in GSM8K's JSON-lines format."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the data set {path} is not UTF-8 text (byte {error.start}).") from error
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(problems) == limit:
            break
        if line.strip():
            problems.append(_parse(line, len(problems) + 1, f"{path}, line {number}"))
    if not problems:
        raise ConfigError(f"the data set {path} holds no problem; each line is one JSON object.")
    return tuple(problems)


def _parse(line: str, number: int, place: str) -> Problem:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON ({error.msg}, column {error.colno}).") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, a number of thousands of digits
        raise ConfigError(f"{place}: JSON that cannot be read ({error}).") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: a JSON object is wanted, found {type(entry).__name__}.")
    for key in ("question", "answer"):
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            raise ConfigError(f"{place}: the object has no text under {key!r}.")
        if not entry[key].isprintable() and any("\ud800" <= character <= "\udfff" for character in entry[key]):
            raise ConfigError(f"{place}: the text under {key!r} holds half of a surrogate pair, which is no text.")
    if marked_answer(entry["answer"]) is None:
        raise ConfigError(f"{place}: the answer does not end in a line '#### N' with a number N.")
    return Problem(number, entry["question"], entry["answer"])


def marked_answer(text: str) -> Decimal | None:
    """The number behind the first ``####``, None where there is none."""
    found = re.search(rf"####\s*({_NUMBER})", text)
    return _decimal(found[1]) if found else None


def given_answer(text: str) -> Decimal | None:
    """The number that a model's output gives: the marked one, else the last one in the text.

    The second rule is what evaluation harnesses call "flexible extract"; a chat model does not know the mark.
    """
    marked = marked_answer(text)
    if marked is not None:
        return marked
    numbers = re.findall(_NUMBER, text)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))
