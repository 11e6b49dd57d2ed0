"""Environment variables for one library, and for no longer than it reads them.

All libraries on UCX read ``UCX_*``: what is meant for one of them changes the others, and child processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that hold while the block runs; those that the user has set are left alone."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def variables_kept_for_later(prefix: str, kept: dict[str, str]) -> Iterator[None]:
    """Take out again what the block adds to the environment under `prefix`, and put it into `kept`."""
    before = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            if name.startswith(prefix):
                kept[name] = os.environ.pop(name)
