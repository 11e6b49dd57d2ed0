"""The child process of `pdkv_connectors.nixl.probe`: one agent, one buffer, two reads, one line of JSON."""

from __future__ import annotations

import base64
import json
import mmap
import os
import sys
import time
from typing import Any


def main() -> None:
    from nixl._api import nixl_agent, nixl_agent_config

    job = json.loads(sys.argv[1])
    nbytes, memory, device_id = job["nbytes"], job["memory"], job["device_id"]
    buffer, keep = _buffer(memory, device_id, nbytes)
    agent = nixl_agent(f"pdkv-probe-{os.getpid()}", nixl_agent_config(enable_prog_thread=False))
    agent.register_memory(agent.get_reg_descs([(buffer, nbytes, device_id, "")], memory))
    peer = agent.add_remote_agent(base64.b64decode(job["agent"]))
    local = agent.get_xfer_descs([(buffer, nbytes, device_id)], memory)
    remote = agent.get_xfer_descs([(job["address"], nbytes, device_id)], memory)
    deadline = time.monotonic() + job["timeout_s"]
    # The first read also connects; the second shows the bandwidth.
    seconds = min(_read(agent, local, remote, peer, deadline) for _ in range(2))
    print(json.dumps({"seconds": seconds}), flush=True)
    # The agent's end takes a while and can hang on a peer that has gone; the answer is out.
    os._exit(0 if keep is not None else 1)


def _buffer(memory: str, device_id: int, nbytes: int) -> tuple[int, Any]:
    """Address of a buffer, and what keeps it."""
    if memory == "DRAM":
        import numpy as np

        pages = mmap.mmap(-1, nbytes)
        return int(np.frombuffer(pages, np.uint8).ctypes.data), pages
    from cuda.bindings import driver as cuda

    def call(function: Any, *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if status != cuda.CUresult.CUDA_SUCCESS:
            sys.exit(f"{function.__name__} failed with {status!r}")
        return values[0] if values else None

    call(cuda.cuInit, 0)
    context = call(cuda.cuDevicePrimaryCtxRetain, call(cuda.cuDeviceGet, device_id))
    call(cuda.cuCtxSetCurrent, context)
    return int(call(cuda.cuMemAlloc, nbytes)), context


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
