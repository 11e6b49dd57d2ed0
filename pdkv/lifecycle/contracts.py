"""What the lifecycle asks of a connector, of the engine around it, and of a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pdkv.kvcache import GrowableKVCache, KVCacheConfig


class RegistersKVCache(Protocol):
    """What the lifecycle asks of a connector."""

    #: Whether the connector registers memory with a transport. If so, each segment must be one chunk first. A connector
    #: that copies through buffers of its own says no.
    registers_memory: bool

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        """Register ``cache.extents()``, or parts of them, and nothing else (I5, I6).

        Called once after construction, and once after each :meth:`unregister_kv_cache`.
        """

    def unregister_kv_cache(self) -> None:
        """Drop every registration. Idempotent, and allowed after a :meth:`register_kv_cache` that failed half-way.

        When it returns, no transfer touches the memory any more.
        """


class ConnectorFactory(Protocol):
    """Builds the connector for the committed blocks: a class, or a function with the attribute."""

    #: As of the connector that is built; it is needed before there is one.
    registers_memory: bool

    def __call__(self, config: KVCacheConfig) -> RegistersKVCache: ...


Rebind = Callable[[Mapping[str, "torch.Tensor"], "KVCacheConfig"], None]
"""Makes the engine use these views, ``{layer: [num_blocks, H, N, C]}``, and this number of blocks from now on."""

AgreeMinimum = Callable[[int], int]
"""Returns the minimum of its argument over all ranks. A collective: every rank calls it once, or all of them wait."""


class ServesPeers(RegistersKVCache, Protocol):
    """What :func:`pdkv.lifecycle.grow_live` asks of a connector, which has peers by then."""

    def pause_transfers(self, timeout_s: float) -> None:
        """Let no transfer begin, and wait until none runs, in or out; peers have dropped what they know of this memory.

        Raises:
            TimeoutError: a transfer still runs. Transfers go on as before.
        """

    def publish(self, generation: int) -> None:
        """Tell peers the present registration and its generation, by which they know that they must connect again."""

    def resume_transfers(self) -> None:
        """Let transfers begin again."""


class SleepsWithPeers(RegistersKVCache, Protocol):
    """What sleeping, waking and lending ask of a connector."""

    def refuse_transfers(self) -> None:
        """Let no transfer begin, in or out, until :meth:`resume_transfers`. Waits for nothing. Idempotent."""

    def holders(self) -> Sequence[str]:
        """Requests whose blocks a peer may still read or write: leases, running transfers, quarantine.

        Makes what progress can be made without waiting; it is called again and again while a sleep waits.
        """

    def abort_transfers(self, reason: str) -> None:
        """Tell peers that these requests are over, and end each transfer, or keep its blocks in quarantine.

        What could not be ended yet stays among :meth:`holders`.
        """

    def withdraw(self) -> None:
        """Tell peers to drop the remote agent, and serve the handshake no more. Waits for no peer."""

    def publish(self, generation: int) -> None:
        """Tell peers the present registration and its generation, by which they know that they must connect again."""

    def resume_transfers(self) -> None:
        """Let transfers begin again."""


class WaitingClock(Protocol):
    """Where waits have their time from; tests give one that needs none."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    def sleep(self, seconds: float) -> None:
        """Let that many seconds pass."""


class SystemClock:
    """The clock of a real process."""

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
