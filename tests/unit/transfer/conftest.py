"""The caches that properties are tried on are those of the cache's own tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kvcache"))
