"""What pyproject.toml announces, beside what a user reads of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def test_the_readme_lists_every_extra_and_no_other() -> None:
    announced = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    _, _, table = (ROOT / "README.md").read_text().partition("| extra | brings |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(announced)
