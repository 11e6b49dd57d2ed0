"""Starts the program; see :mod:`pdkv.keys.cli`."""

from __future__ import annotations

import sys

from pdkv.keys.cli import main

if __name__ == "__main__":
    sys.exit(main())
