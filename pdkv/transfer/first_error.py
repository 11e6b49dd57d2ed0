"""Ends several things, each also where another one fails, and tells of the first failure afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)


class FirstError:
    """As a context manager it raises the first failure when it is left, unless another exception leaves it already.

    Failures are logged when they happen. Used without `with`, nothing is raised.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def attempt(self, what: str, work: Callable[[], object]) -> bool:
        """Whether `work` succeeded. `what` completes «could not ...»."""
        try:
            work()
        except Exception as error:
            logger.warning("Could not %s: %s", what, error)
            self.error = self.error or error
            return False
        return True

    def __enter__(self) -> FirstError:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self.error is not None:
            raise self.error
