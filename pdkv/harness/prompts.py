"""What the engines are asked: the same request bodies for every endpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdkv.errors import ConfigError
from pdkv.harness.dataset import Problem

STYLES = ("few-shot", "chat")
#: Problems in front of the question, as in GSM8K's usual 5-shot evaluation.
SHOTS = 5
_CHAT_ASK = "Solve the problem step by step. End with a line '#### N', where N is the answer as a plain number.\n\n"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: the path of the endpoint and the JSON body."""

    path: str
    body: dict[str, Any]


def build_prompts(
    problems: Sequence[Problem], style: str, examples: Sequence[Problem], max_tokens: int
) -> tuple[Prompt, ...]:
    """One request for each problem, greedy and with a fixed seed.

    Args:
        problems: what is asked.
        style: ``few-shot`` (completions API) or ``chat`` (chat completions API, the model's own template).
        examples: solved problems in front of the question; read for ``few-shot`` only.
        max_tokens: upper bound of each output.

    Raises:
        ConfigError: unknown style, or fewer examples than :data:`SHOTS`.
    """
    if style not in STYLES:
        raise ConfigError(f"there is no prompt style {style!r}; choose one of: {', '.join(STYLES)}.")
    # Greedy decoding draws nothing; the seed is fixed all the same, so that a sampling default of a model's generation
    # configuration cannot bring chance in. Token ids are what is compared: text can hide a difference.
    common = {"max_tokens": max_tokens, "temperature": 0, "seed": 0, "stream": False, "return_token_ids": True}
    if style == "chat":
        return tuple(
            Prompt(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": _CHAT_ASK + problem.question}], **common},
            )
            for problem in problems
        )
    if len(examples) < SHOTS:
        raise ConfigError(f"{SHOTS}-shot prompts need {SHOTS} examples, found {len(examples)}; add some to the file.")
    shown = "".join(_question(p) + f" {p.answer}\n\n" for p in examples[:SHOTS])
    # A model that goes on with a question of its own has finished its answer.
    return tuple(
        Prompt("/v1/completions", {"prompt": shown + _question(problem), "stop": ["\n\nQuestion:"], **common})
        for problem in problems
    )


def _question(problem: Problem) -> str:
    return f"Question: {problem.question}\nAnswer:"


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash that is equal exactly where the same requests are made."""
    text = json.dumps([[prompt.path, prompt.body] for prompt in prompts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
