"""Reading data sets, and reading answers."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from pdkv.errors import ConfigError
from pdkv.harness.dataset import given_answer, load_problems

pytestmark = pytest.mark.cpu

GOOD = '{"question": "How many?", "answer": "Two. #### 2"}\n'


def test_limit_takes_the_first_problems_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD + "\n" + GOOD.replace("many", "much") + GOOD)
    problems = load_problems(path, limit=2)
    assert [problem.number for problem in problems] == [1, 2]
    assert problems[1].question == "How much?"
    assert problems[0].expected == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "a JSON object is wanted, found list"),
        ('{"question": "Q"}', "no text under 'answer'"),
        ('{"question": " ", "answer": "#### 1"}', "no text under 'question'"),
        ('{"question": "Q", "answer": "twelve"}', "does not end in a line '#### N'"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD + line + "\n")
    with pytest.raises(ConfigError, match=r"data\.jsonl, line 2: ") as caught:
        load_problems(path)
    assert complaint in str(caught.value)


def test_missing_empty_and_binary_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_problems(tmp_path / "none.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="holds no problem"):
        load_problems(empty)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"abc\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_problems(binary)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so it is 5.\n#### 1,200\nand 7", Decimal(1200)),
        ("first 3, then $4.50", Decimal("4.50")),
        ("it falls to -3 degrees.", Decimal(-3)),
        ("no number", None),
    ],
)
def test_the_marked_number_counts_and_else_the_last_one(text: str, expected: Decimal | None) -> None:
    assert given_answer(text) == expected


def test_an_end_of_line_of_unicode_within_a_text_and_a_byte_order_mark_are_no_errors(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    question = "a\u2028b\u0085c\u000cd"
    line = '{"question": "' + question.replace("\u000c", "\\f") + '", "answer": "#### 2"}'
    path.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n")
    assert load_problems(path)[0].question == question


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("[" * 100_000, "JSON that cannot be read"),
        ('{"question": "a", "answer": "#### 2", "n": ' + "9" * 5000 + "}", "JSON that cannot be read"),
        (r'{"question": "a\ud800", "answer": "#### 2"}', "half of a surrogate pair"),
    ],
)
def test_a_line_that_json_or_text_cannot_hold_is_one_sentence(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=f"line 1: .*{complaint}"):
        load_problems(path)
