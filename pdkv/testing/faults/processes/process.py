"""``python -m pdkv.testing.faults.processes.process FD ENGINE_ID ROLE MODE TRANSPORT [PEERS]``: one engine."""

from __future__ import annotations

import sys

from pdkv.testing.child import serve
from pdkv.testing.faults.processes.engine import EngineProcess

if __name__ == "__main__":
    fd, engine_id, role, mode, transport, peers = (*sys.argv[1:], "")[:6]
    engine = EngineProcess(engine_id, role, mode, transport, peers)  # type: ignore[arg-type]
    serve(engine, int(fd), engine.idle)
