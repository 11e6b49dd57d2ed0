"""What the transfer code counts, and how it is observed without being put at risk by the observer.

Whatever is ignored, refused, given up or recomputed is counted under a name of its own (I13). An observer, such as a
metrics exporter, is told of each count; when it raises, that is counted too and the transfer goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)

Observer = Callable[[str, int], None]
"""Called with the name of what happened and how many of it."""


class Counters:
    """Totals by name since start-up. Names are lower-case words joined by underscores, e.g. ``late_done``."""

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer
        self._totals: Counter[str] = Counter()
        self._lock = threading.Lock()  # several threads may count the same

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a total and tell the observer, whose failures never reach the caller."""
        with self._lock:
            self._totals[name] += amount
        if self._observer is None:
            return
        try:
            self._observer(name, amount)
        except Exception:
            self._totals["observer_errors"] += 1
            if self._totals["observer_errors"] == 1:
                logger.exception("The observer of transfer counts raised; transfers go on, later errors are counted.")

    def __getitem__(self, name: str) -> int:
        return self._totals[name]

    def as_dict(self) -> dict[str, int]:
        """All totals that are not zero, by name."""
        return dict(sorted(self._totals.items()))
