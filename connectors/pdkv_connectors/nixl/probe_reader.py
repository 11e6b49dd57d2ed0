"""The child process of `pdkv_connectors.nixl.probe`: one agent, one buffer, a few reads, one line of JSON."""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import sys
import time
from itertools import accumulate
from typing import Any


def main() -> None:
    from nixl._api import nixl_agent, nixl_agent_config

    job = json.load(sys.stdin)
    nbytes, memory, device_id, look_at = job["nbytes"], job["memory"], job["device_id"], job["look_at"]
    buffer_nbytes = max(nbytes, sum(length for _, length in look_at))
    buffer, keep = _buffer(memory, device_id, buffer_nbytes)
    agent = nixl_agent(f"pdkv-probe-{os.getpid()}", nixl_agent_config(enable_prog_thread=False))
    agent.register_memory(agent.get_reg_descs([(buffer, buffer_nbytes, device_id, "")], memory))
    peer = agent.add_remote_agent(base64.b64decode(job["agent"]))
    local = agent.get_xfer_descs([(buffer, nbytes, device_id)], memory)
    remote = agent.get_xfer_descs([(job["address"], nbytes, device_id)], memory)
    deadline = time.monotonic() + job["timeout_s"]
    # The first read also connects; the second shows the bandwidth.
    seconds = min(_read(agent, local, remote, peer, deadline) for _ in range(2))
    contents = _contents(agent, peer, buffer, job, deadline) if look_at else []
    print(json.dumps({"seconds": seconds, "contents": contents}), flush=True)
    # The agent's end takes a while and can hang on a peer that has gone; the answer is out.
    os._exit(0 if keep is not None else 1)


def _buffer(memory: str, device_id: int, nbytes: int) -> tuple[int, Any]:
    """Address of a buffer, and what keeps it."""
    if memory == "DRAM":
        import numpy as np

        pages = mmap.mmap(-1, nbytes)
        return int(np.frombuffer(pages, np.uint8).ctypes.data), pages
    from cuda.bindings import driver as cuda

    _call(cuda.cuInit, 0)
    context = _call(cuda.cuDevicePrimaryCtxRetain, _call(cuda.cuDeviceGet, device_id))
    _call(cuda.cuCtxSetCurrent, context)
    return int(_call(cuda.cuMemAlloc, nbytes)), context


def _call(function: Any, *arguments: Any) -> Any:
    """A call of the CUDA driver; the process ends where it fails."""
    status, *values = function(*arguments)
    if int(status):
        sys.exit(f"{function.__name__} failed with {status!r}")
    return values[0] if values else None


def _contents(agent: Any, peer: str, buffer: int, job: dict[str, Any], deadline: float) -> list[str]:
    """What is in the ranges of `look_at`, in base64: read side by side into the buffer, by one request."""
    memory, device_id = job["memory"], job["device_id"]
    begins = list(accumulate((length for _, length in job["look_at"]), initial=buffer))
    here = [(begin, length, device_id) for begin, (_, length) in zip(begins, job["look_at"], strict=False)]
    there = [(address, length, device_id) for address, length in job["look_at"]]
    _read(agent, agent.get_xfer_descs(here, memory), agent.get_xfer_descs(there, memory), peer, deadline)
    data = _to_host(buffer, begins[-1] - buffer, memory)
    return [base64.b64encode(data[begin - buffer : begin - buffer + length]).decode() for begin, length, _ in here]


def _to_host(buffer: int, nbytes: int, memory: str) -> bytes:
    if memory == "DRAM":
        return ctypes.string_at(buffer, nbytes)
    import numpy as np
    from cuda.bindings import driver as cuda

    data = np.empty(nbytes, np.uint8)
    _call(cuda.cuMemcpyDtoH, data.ctypes.data, buffer, nbytes)
    return data.tobytes()


def _read(agent: Any, local: Any, remote: Any, peer: str, deadline: float) -> float:
    begin = time.perf_counter()
    handle = agent.initialize_xfer("READ", local, remote, peer)
    state = agent.transfer(handle)
    while state == "PROC":
        if time.monotonic() > deadline:
            sys.exit("the read did not end in time")
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        sys.exit(f"the read ended as {state}")
    seconds = time.perf_counter() - begin
    agent.release_xfer_handle(handle)
    return seconds


if __name__ == "__main__":
    main()
