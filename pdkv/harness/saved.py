"""A reference's answers in a file, so that several comparisons can share one run of the stock engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pdkv.errors import ConfigError, HarnessError
from pdkv.harness.client import Completion
from pdkv.harness.prompts import Prompt, fingerprint


def save_answers(path: Path, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
    """Write answers with the fingerprint of what was asked.

    Raises:
        HarnessError: the file cannot be written.
    """
    content = {"requests": fingerprint(prompts), "answers": [asdict(completion) for completion in completions]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise HarnessError(f"cannot keep the reference's answers in {path} ({error.strerror}).") from error


def load_answers(path: Path, prompts: Sequence[Prompt]) -> tuple[Completion, ...]:
    """Answers to exactly these prompts.

    Raises:
        ConfigError: the file cannot be read, or holds answers to something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        requests, entries = content["requests"], content["answers"]
        completions = tuple(Completion(**{**entry, "token_ids": tuple(entry["token_ids"])}) for entry in entries)
    except OSError as error:
        raise ConfigError(f"cannot read the kept answers {path} ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} holds no answers that --save-reference wrote ({error}).") from error
    if requests != fingerprint(prompts):
        raise ConfigError(f"the answers kept in {path} are to other prompts; make them anew with --save-reference.")
    return completions
