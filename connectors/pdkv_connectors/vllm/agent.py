"""The end of a NIXL agent, as a fence: what must not be reached any more has no agent that could serve it.

Deregistering is not enough. A peer that was told nothing, and reads with what it knew, then kills the owner or gets old
data (measured over tcp, posix shared memory and CUDA's emulation). Once the agent is destroyed its read fails at once
on its own side (`nixlRemoteDisconnectError`), and the owner lives.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from pdkv.errors import TransportError
from pdkv_connectors.vllm.guard import GuardedAgent


def destroy_worker(worker: Any) -> None:
    """End a stock NIXL worker and see to it that its native agent is gone.

    Waits for a handshake that is running, which the stock worker bounds by 5 s a rank.

    Raises:
        TransportError: something still holds the native agent, so that peers might still be served by it.
    """
    worker.shutdown()
    worker._handshake_initiation_executor.shutdown(wait=True, cancel_futures=True)
    agent = worker.nixl_wrapper
    if isinstance(agent, GuardedAgent):
        agent = agent.unguarded
    native = weakref.ref(agent.agent)
    del agent.agent
    if native() is not None:
        gc.collect()
    if native() is not None:
        agent.agent = native()
        raise TransportError(
            "the NIXL agent is still in use and cannot be destroyed, so the KV cache stays where it is; end the "
            "transfers that are running and try again."
        )
