"""``python -m pdkv.testing.transports.process FD FACTORY DRIVER``: a side of a transport in a process of its own.

FACTORY is ``module:function`` and returns a new transport; replies go to the file descriptor FD.
"""

from __future__ import annotations

import importlib
import sys

from pdkv.testing.child import serve
from pdkv.testing.transports.side import TransportFactory, TransportSide


def load(factory: str) -> TransportFactory:
    """The function that ``module:function`` names."""
    module, _, name = factory.partition(":")
    found: TransportFactory = getattr(importlib.import_module(module), name)
    return found


if __name__ == "__main__":
    side = TransportSide(load(sys.argv[2]), sys.argv[3])
    serve(side, int(sys.argv[1]), side.idle)
