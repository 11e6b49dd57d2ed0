"""Token-by-token comparison of two runs over the same problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdkv.errors import HarnessError
from pdkv.harness.client import Completion
from pdkv.harness.dataset import Problem, given_answer


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which two outputs differ; None stands for an output that has ended before."""

    position: int
    reference_token: int | None
    candidate_token: int | None


@dataclass(frozen=True, slots=True)
class Result:
    """One problem, answered by both."""

    problem: Problem
    reference: Completion
    candidate: Completion

    @property
    def difference(self) -> Difference | None:
        """Where the outputs differ; None where they are identical."""
        return first_difference(self.reference.token_ids, self.candidate.token_ids)

    def is_correct(self, completion: Completion) -> bool:
        """Whether an output gives the number that the data set expects."""
        return given_answer(completion.text) == self.problem.expected


def first_difference(reference: Sequence[int], candidate: Sequence[int]) -> Difference | None:
    """The first position, counted from 0, at which two outputs differ."""
    for position in range(max(len(reference), len(candidate))):
        wanted = reference[position] if position < len(reference) else None
        found = candidate[position] if position < len(candidate) else None
        if wanted != found:
            return Difference(position, wanted, found)
    return None


def compare(
    problems: Sequence[Problem], reference: Sequence[Completion], candidate: Sequence[Completion]
) -> tuple[Result, ...]:
    """Pair the two runs.

    Raises:
        HarnessError: the runs do not answer the same problems, or answer one with no token: nothing is compared then.
    """
    if not len(problems) == len(reference) == len(candidate):
        raise HarnessError(
            f"{len(problems)} problems do not go with {len(reference)} answers of the reference and {len(candidate)} "
            "of the candidate."
        )
    results = tuple(Result(*row) for row in zip(problems, reference, candidate, strict=True))
    for result in results:
        number = result.problem.number
        if result.reference.prompt_tokens != result.candidate.prompt_tokens:
            raise HarnessError(
                f"problem {number} has {result.reference.prompt_tokens} prompt tokens on the reference and "
                f"{result.candidate.prompt_tokens} on the candidate; do both serve the same model?"
            )
        if not result.reference.token_ids:
            raise HarnessError(
                f"the reference answered problem {number} with no token, so there is nothing to compare."
            )
    return results
