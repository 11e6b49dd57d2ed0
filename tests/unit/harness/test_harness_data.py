"""The project's own problems: the format is GSM8K's and the arithmetic is right."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from pdkv.harness.dataset import Problem, load_problems, marked_answer

pytestmark = pytest.mark.cpu

DATA = Path(__file__).parents[3] / "examples" / "data"
OWN, SHOTS = load_problems(DATA / "grade_school.jsonl"), load_problems(DATA / "few_shot.jsonl")
OPERATORS: dict[type, Callable[[Decimal, Decimal], Decimal]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(node: ast.expr, text: str) -> Decimal:
    if isinstance(node, ast.Constant):
        return Decimal(ast.get_source_segment(text, node) or "")
    assert isinstance(node, ast.BinOp)
    return OPERATORS[type(node.op)](calculate(node.left, text), calculate(node.right, text))


def value_of(expression: str) -> Decimal:
    return calculate(ast.parse(expression, mode="eval").body, expression)


@pytest.mark.parametrize("problem", [*OWN, *SHOTS], ids=lambda problem: problem.question[:30])
def test_every_annotated_calculation_and_the_final_answer_are_right(problem: Problem) -> None:
    lines = problem.answer.splitlines()
    assert lines[-1].startswith("#### ")
    results = []
    for line in lines[:-1]:
        annotations = re.findall(r"<<([^=<>]+)=([^<>]+)>>([\d.]+)", line)
        assert len(annotations) == 1, f"one annotation a line, followed by its result: {line}"
        expression, result, shown = annotations[0]
        assert value_of(expression) == Decimal(result) == Decimal(shown.rstrip("."))
        assert f"{expression} =" in line.replace(" = $", " ="), "the annotation repeats what the sentence calculates"
        results.append(Decimal(result))
    assert marked_answer(problem.answer) == results[-1]


def test_there_are_enough_problems_and_no_example_is_asked() -> None:
    assert len(OWN) >= 16
    assert len(SHOTS) == 5
    questions = [problem.question for problem in (*OWN, *SHOTS)]
    assert len(set(questions)) == len(questions)


def test_a_wrong_calculation_would_be_found() -> None:
    assert value_of("2*20-24") == 16
    assert value_of("18*2.5") != 46
