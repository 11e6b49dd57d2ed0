"""Token-by-token comparison."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import HarnessError
from pdkv.harness.client import Completion
from pdkv.harness.compare import Difference, compare, first_difference
from pdkv.harness.dataset import Problem

pytestmark = pytest.mark.cpu

PROBLEM = Problem(1, "How many?", "Two. #### 2")
TOKENS = st.lists(st.integers(0, 49151), min_size=1, max_size=40)


def completion(token_ids: tuple[int, ...], prompt_tokens: int = 9) -> Completion:
    return Completion(prompt_tokens, token_ids, "#### 2", "length")


@given(tokens=TOKENS, data=st.data())
def test_one_changed_token_is_reported_with_its_position(tokens: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[position] += 1
    assert first_difference(tokens, changed) == Difference(position, tokens[position], tokens[position] + 1)


@given(tokens=TOKENS, data=st.data())
def test_an_output_that_ends_early_differs_where_it_ends(tokens: list[int], data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(tokens) - 1))
    assert first_difference(tokens, tokens[:end]) == Difference(end, tokens[end], None)
    assert first_difference(tokens[:end], tokens) == Difference(end, None, tokens[end])


@given(tokens=TOKENS)
def test_equal_outputs_do_not_differ(tokens: list[int]) -> None:
    assert first_difference(tokens, list(tokens)) is None


def test_equal_text_from_different_tokens_is_a_difference() -> None:
    (result,) = compare([PROBLEM], [completion((5, 6))], [completion((5, 7))])
    assert result.reference.text == result.candidate.text
    assert result.difference == Difference(1, 6, 7)


def test_nothing_is_not_compared_with_nothing() -> None:
    with pytest.raises(HarnessError, match="with no token"):
        compare([PROBLEM], [completion(())], [completion(())])


def test_prompts_of_unequal_length_are_not_the_same_model() -> None:
    with pytest.raises(HarnessError, match="same model"):
        compare([PROBLEM], [completion((1,))], [completion((1,), prompt_tokens=8)])


def test_a_missing_answer_is_noticed() -> None:
    with pytest.raises(HarnessError, match="do not go with"):
        compare([PROBLEM], [completion((1,))], [])
