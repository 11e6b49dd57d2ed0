"""Measure how fast a peer on this machine reads registered memory, before any request depends on it.

UCX chooses a transport by itself and says nothing when it falls back: memory that it cannot map moves by software
emulation over tcp, two hundred times slower, with right data. Only a real read from a second process shows it (I13).
The reader is `pdkv_connectors.nixl.probe_reader`, a short-lived child that holds one buffer.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from pdkv.errors import ConnectorError

#: Long enough that the start of a transfer does not matter, short enough at the 0.2 GB/s of emulation: 0.2 s.
PROBE_NBYTES = 32 << 20
#: The reader imports NIXL, and on CUDA makes a context; both take seconds on a busy machine.
PROBE_TIMEOUT_S = 60.0
_POLL_S = 0.0005
#: For a killed process to be gone; one that hangs in a driver is not waited for longer.
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the reader measured: `nbytes` read in `seconds`, the better of two reads."""

    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Bandwidth in 10^9 bytes a second."""
        return self.nbytes / self.seconds / 1e9


def measure_read(
    agent: Any, address: int, nbytes: int, *, memory: str, device_id: int, timeout_s: float = PROBE_TIMEOUT_S
) -> ProbeReport:
    """Have a child process READ up to :data:`PROBE_NBYTES` of a registered range of `agent`, and time it.

    Args:
        agent: the NIXL agent that registered the range; it is polled meanwhile, so that it makes progress.
        memory: NIXL's kind of memory, "DRAM" or "VRAM"; the reader's buffer is of the same kind.

    Raises:
        ConnectorError: the reader could not read, or not within `timeout_s`. The message says why.
    """
    job = {
        "agent": base64.b64encode(agent.get_agent_metadata()).decode(),
        "address": address,
        "nbytes": min(nbytes, PROBE_NBYTES),
        "memory": memory,
        "device_id": device_id,
        "timeout_s": timeout_s,
    }
    reader = subprocess.Popen(
        [sys.executable, "-m", "pdkv_connectors.nixl.probe_reader", json.dumps(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + timeout_s
        while reader.poll() is None:
            if time.monotonic() > deadline:
                raise ConnectorError(
                    f"the NIXL probe read nothing within {timeout_s:g} s; see whether peers read at all, or skip the "
                    "probe with PDKV_PROBE=0."
                )
            agent.get_new_notifs()
            time.sleep(_POLL_S)
        output = reader.communicate()[0]
    finally:
        if reader.poll() is None:
            reader.kill()
        reader.wait(_END_TIMEOUT_S)
    return _report(output, job["nbytes"], reader.returncode)


def _report(output: str, nbytes: int, returncode: int) -> ProbeReport:
    lines = output.strip().splitlines() or ["(no output)"]
    try:
        found = json.loads(lines[-1])
        return ProbeReport(nbytes, float(found["seconds"]))
    except (ValueError, KeyError, TypeError):
        raise ConnectorError(f"the NIXL probe failed (exit {returncode}): {lines[-1]}") from None
