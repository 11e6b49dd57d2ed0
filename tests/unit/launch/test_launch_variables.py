"""The variables of pdkv, and where a user finds them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pdkv.kvcache.sizing_constants import SizingConstants
from pdkv.launch import command
from pdkv.launch.cli import parser

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[3]
NAME = re.compile(r"PDKV_[A-Z_]+")


def named_in_code() -> set[str]:
    """Every text of the code that is nothing but the name of a variable; docstrings and messages are more than that."""
    sources = [path for folder in ("pdkv", "connectors") for path in (ROOT / folder).rglob("*.py")]
    return {
        node.value
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value)
    }


def listed() -> set[str]:
    rows = re.findall(r"^``(PDKV_[A-Z_]+…?)``  *\S", command.__doc__ or "", re.MULTILINE)
    assert len(rows) == len(set(rows))
    return set(rows)


def test_the_launcher_lists_every_variable_that_the_code_reads_and_no_other():
    prefix = SizingConstants.ENVIRONMENT_PREFIX
    of_sizing = {prefix, *SizingConstants().as_environment()}
    in_messages = {"PDKV_ADMISSION_"}  # the beginning of two of them
    assert listed() == {name for name in named_in_code() if name not in of_sizing | in_messages} | {f"{prefix}…"}


def test_documentation_names_no_variable_that_does_not_exist():
    known = named_in_code() | set(SizingConstants().as_environment()) | {"PDKV_GPU_RECORDS"}
    pages = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples/pd_deploy").iterdir()]
    assert len(pages) > 10
    for page in pages:
        assert set(NAME.findall(page.read_text(encoding="utf-8"))) <= known, page


def test_the_help_says_where_the_list_is():
    assert f"pydoc {command.__name__}" in " ".join(parser().format_help().split())
