"""Measure how fast a peer on this machine reads registered memory, before any request depends on it.

UCX chooses a transport by itself and says nothing when it falls back: memory that it cannot map moves by software
emulation over tcp, two hundred times slower, with right data. Only a real read from a second process shows it (I13).
The reader is `pdkv_connectors.nixl.probe_reader`, a short-lived child that holds one buffer.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from threading import Thread
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
    """What the reader measured: `nbytes` read in `seconds`, the better of two reads.

    `transport` is what UCX says that it used for a READ of this size, or "unknown"; `contents` what the reader found in
    the ranges that it was asked to look at.
    """

    nbytes: int
    seconds: float
    transport: str = "unknown"
    contents: tuple[bytes, ...] = ()

    @property
    def gb_per_s(self) -> float:
        """Bandwidth in 10^9 bytes a second."""
        return self.nbytes / self.seconds / 1e9


def measure_read(
    agent: Any,
    address: int,
    nbytes: int,
    *,
    memory: str,
    device_id: int,
    timeout_s: float = PROBE_TIMEOUT_S,
    look_at: Sequence[tuple[int, int]] = (),
) -> ProbeReport:
    """Have a child process READ up to :data:`PROBE_NBYTES` of a registered range of `agent`, and time it.

    Args:
        agent: the NIXL agent that registered the range; it is polled meanwhile, so that it makes progress.
        memory: NIXL's kind of memory, "DRAM" or "VRAM"; the reader's buffer is of the same kind.
        look_at: address and length of ranges whose contents are wanted, each within one registration.

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
        "look_at": [list(part) for part in look_at],
    }
    with TemporaryFile() as stdin:  # too long for a command line, and a pipe could fill
        stdin.write(json.dumps(job).encode())
        stdin.seek(0)
        reader = subprocess.Popen(
            [sys.executable, "-m", "pdkv_connectors.nixl.probe_reader"],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "UCX_PROTO_INFO": "y"},
        )
    output = _Output(reader)
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
    finally:
        if reader.poll() is None:
            reader.kill()
        reader.wait(_END_TIMEOUT_S)
    return _report(output.text(), min(nbytes, PROBE_NBYTES), reader.returncode)


class _Output:
    """Takes in what a process says, so that it never waits for someone to read it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._parts: list[str] = []
        self._thread = Thread(target=self._read, args=(process,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """All of it, once the process has ended."""
        self._thread.join(_END_TIMEOUT_S)
        return "".join(self._parts)

    def _read(self, process: subprocess.Popen[str]) -> None:
        if process.stdout is not None:
            with process.stdout as stdout:
                self._parts.extend(stdout)


def _report(output: str, nbytes: int, returncode: int) -> ProbeReport:
    lines = output.strip().splitlines() or ["(no output)"]
    try:
        found = json.loads(lines[-1])
        contents = tuple(base64.b64decode(part) for part in found["contents"])
        return ProbeReport(nbytes, float(found["seconds"]), transport_used(lines), contents)
    except (ValueError, KeyError, TypeError):
        raise ConnectorError(f"the NIXL probe failed (exit {returncode}): {lines[-1]}") from None


def transport_used(lines: Sequence[str]) -> str:
    """What UCX used for large READs from a peer, e.g. ``zero-copy, cma/memory``, from its UCX_PROTO_INFO tables.

    Such a table has a title with "remote memory read by ucp_get", and a row for each range of sizes; the last one is
    that of the largest. Tables of a process with itself are named "self" and left out.
    """
    inside, own, row = False, False, "unknown"
    for line in lines:
        cells = [cell.strip() for cell in line.partition("|")[2].split("|")[:-1]]
        if len(cells) == 1:
            own = cells[0].split(" ")[1:2] == ["self"] if "cfg#" in cells[0] else own
            inside = "remote memory read by ucp_get" in cells[0] and not own
        elif inside and len(cells) == 3 and re.match(r"\d", cells[0]):
            row = f"{cells[1]}, {cells[2]}"
    return row
