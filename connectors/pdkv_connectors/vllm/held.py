"""A refusal to sleep with those who hold blocks, as the text of an exception: all that vLLM carries over processes.

And the mode of sleep in which nothing is held any more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_MARK = "pdkv-holders:"

#: Beside vLLM's own modes of sleep, "abort", "wait" and "keep": see :meth:`sleep_engine.SleepGate.sleep`.
ABORT_TRANSFERS = "abort_transfers"


def with_holders(reason: str, holders: Sequence[str]) -> str:
    """The text of the exception; `reason` is one sentence."""
    return f"{reason} {_MARK} {json.dumps(list(holders))}"


def holders_in(text: str) -> tuple[str, list[str]] | None:
    """The reason and the holders in a text that :func:`with_holders` made, whatever was put around it; else None."""
    reason, mark, rest = text.partition(_MARK)
    if not mark:
        return None
    try:
        holders, _ = json.JSONDecoder().raw_decode(rest.lstrip())
    except ValueError:
        holders = []
    return reason_in(reason), [str(holder) for holder in holders]


def reason_in(text: str) -> str:
    """Without what vLLM puts in front of an exception from the engine's process."""
    return re.sub(r"^.*method failed: ", "", text, flags=re.DOTALL).strip()
