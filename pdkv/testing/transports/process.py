"""``python -m pdkv.testing.transports.process FD FACTORY DRIVER``: a side of a transport in a process of its own.

FACTORY is ``module:function`` or a name of the entry-point group ``pdkv.transports``; replies go to descriptor FD.
"""

from __future__ import annotations

import sys

from pdkv.registry import find_transport
from pdkv.testing.child import serve
from pdkv.testing.transports.side import TransportSide

if __name__ == "__main__":
    side = TransportSide(find_transport(sys.argv[2]), sys.argv[3])
    serve(side, int(sys.argv[1]), side.idle)
