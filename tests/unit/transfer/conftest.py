"""The caches that properties are tried on are those of the cache's own tests; two sessions are a fixture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from session_pair import SessionPair

sys.path.insert(0, str(Path(__file__).parents[1] / "kvcache"))


@pytest.fixture
def pair() -> Iterator[SessionPair]:
    """P and D of one process, on a clock that moves when told to."""
    made = SessionPair()
    yield made
    made.close()
