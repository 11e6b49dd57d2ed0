"""Finding the line that matters in the log of an engine that died.

One failure in a vLLM worker is logged by three processes, each wrapping the one before: the worker's traceback, the
EngineCore's ("WorkerProc initialization failed"), the API server's ("Engine core initialization failed. See root cause
above"). The last lines of the log are therefore the least useful ones.
"""

from __future__ import annotations

import re
from pathlib import Path

TAIL_NBYTES = 256 * 1024
# "(EngineCore_DP0 pid=123) ERROR 11-29 22:00:00 [core.py:100] " and "(Worker pid=9) " before the text itself
_PREFIX = re.compile(
    r"^(?:\x1b\[[0-9;]*m)*(?:\([^)]*pid=\d+\)(?:\x1b\[[0-9;]*m)*\s?)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]*\] ?)?"
)
_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure))(?:: (?P<text>.*))?$"
)
_USAGE = re.compile(
    r"^\S+\.py: error: |^error: |^(?:python\S*|/\S+): (?:No module named|can't open file)"
    r"|^\[pdkv\.launch\.guard\] cannot"
)
# Wrappers that only say that something else failed.
_WRAPPERS = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "See root cause above",
    "EngineDeadError",
    "EngineCore encountered an issue",
    "cancelled",
    "Executor failed",
)


def clean(line: str) -> str:
    """A log line without the process and time that vLLM puts before it."""
    return _PREFIX.sub("", line.rstrip())


def read_tail(path: Path, nbytes: int = TAIL_NBYTES) -> list[str]:
    """The last lines of a log; empty where it cannot be read, for instance because it does not exist yet."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            start = max(0, file.tell() - nbytes)
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[1:] if start else lines


def last_line(path: Path) -> str:
    """The last line with text in it, cleaned; ``""`` where there is none."""
    return next((text for line in reversed(read_tail(path, 8192)) if (text := clean(line).strip())), "")


def root_cause(lines: list[str]) -> str | None:
    """The exception that explains the others, with its message, or None where the log holds none.

    One of pdkv's own wins, then the last one that is no mere wrapper, then a usage error of a command line.
    """
    texts = [clean(line) for line in lines]
    found: list[str] = []
    for index, text in enumerate(texts):
        if _EXCEPTION.match(text):
            found.append(_with_continuation(texts, index))
        elif _USAGE.match(text):
            found.append(text)
    own = [text for text in found if text.startswith("pdkv")]
    telling = [text for text in found if not any(wrapper in text for wrapper in _WRAPPERS)]
    for candidates in (own, telling, found):
        if candidates:
            return candidates[-1]
    return None


def _with_continuation(texts: list[str], index: int) -> str:
    """The exception's line and up to three indented or plain lines of its message that follow."""
    message = [texts[index]]
    for text in texts[index + 1 : index + 4]:
        if not text.startswith("  ") or text.lstrip().startswith(("File ", "Traceback", "For further information")):
            break
        message.append(text.strip())
    return " ".join(message)
