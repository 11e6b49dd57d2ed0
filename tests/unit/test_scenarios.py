"""The table of scenarios in the documentation names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def test_every_scenario_in_the_documentation_is_held_by_tests_that_exist() -> None:
    defined = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined.update(re.findall(r"^ *(?:async )?def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    text = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    rows = text.partition("## Scenarios")[2].splitlines()
    scenarios = [re.findall(r"`(test_\w+)`", row) for row in rows if row.startswith("| ") and "`test_" in row]
    assert len(scenarios) >= 15
    missing = {name for names in scenarios for name in names} - defined
    assert not missing
