"""``python -m pdkv.plan``: the capacity planner. See :mod:`pdkv.planner`."""

from __future__ import annotations

import sys

from pdkv.planner.cli import main

if __name__ == "__main__":
    sys.exit(main())
