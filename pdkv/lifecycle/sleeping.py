"""Sleep and wake: give all memory of the cache back, and take it again.

The order is fixed by what transports do not check (measured with NIXL): a peer that reads memory which was released
gets old data or kills the owner, and memory that is still registered may not come free. So nothing is released before
the connector has dropped every registration, and no transfer is accepted before the new one is published.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pdkv.errors import ConfigError, ConnectorError, LeasesHeldError, OutOfMemoryError
from pdkv.lifecycle._steps import register, timed
from pdkv.lifecycle.contracts import SleepsWithPeers, SystemClock, WaitingClock
from pdkv.lifecycle.states import State, machine_of

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

logger = logging.getLogger(__name__)

SleepMode = Literal["refuse", "wait", "abort"]
MODES: tuple[SleepMode, ...] = ("refuse", "wait", "abort")

#: Between two looks at who still holds blocks, in seconds.
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class SleepReport:
    """What going to sleep, or lending, gave back, in bytes.

    Attributes:
        released: size of the chunks that were let go.
        given_back: how much of it is free again, as the driver counts it.
        pinned: how much is not, because somebody else still holds it.
        peers_told: whether peers could be told; where not, unregistering alone keeps them away.
        times_s: seconds by step: drain, withdraw, unregister, release.
    """

    released: int
    given_back: int
    pinned: int
    peers_told: bool
    times_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WakeReport:
    """What waking did.

    Attributes:
        blocks: blocks committed now, as many as before; they read as zero.
        generation: the cache's generation, higher than before the sleep.
        physical_bytes: physical memory of the cache.
        times_s: seconds by step: commit, register, publish.
    """

    blocks: int
    generation: int
    physical_bytes: int
    times_s: Mapping[str, float]


def sleep(
    cache: GrowableKVCache,
    connector: SleepsWithPeers | None = None,
    *,
    mode: SleepMode = "refuse",
    timeout_s: float = 30.0,
    clock: WaitingClock | None = None,
) -> SleepReport:
    """Give the cache's memory back, under an engine that runs no step until :func:`wake`.

    In this order: accept no transfer; see that nobody holds blocks; tell peers, who drop the remote agent; unregister;
    release. Addresses and views stay; contents do not.

    Args:
        connector: None for an engine without KV transfer.
        mode: where requests hold blocks: "refuse" raises at once, "wait" waits for them to end, "abort" has the
            connector end them first and then waits for what cannot be ended at once.
        timeout_s: seconds that "wait" and "abort" wait at most.

    Raises:
        LeasesHeldError: blocks are held; it lists by whom. The engine runs on as before.
        StateError: the cache is draining, asleep or lent.
        ConnectorError: unregistering failed. The memory is kept and the cache counts as asleep: wake it.
        DriverError: releasing failed. The cache is asleep; waking it replaces what is left.
    """
    if mode not in MODES:
        raise ConfigError(f"a mode of sleep is one of {', '.join(MODES)}, not {mode!r}.")
    machine = machine_of(cache)
    machine.require_running("sleep")
    machine.move(State.DRAINING)
    times_s: dict[str, float] = {}
    try:
        with timed(times_s, "drain"):
            drain(connector, mode, timeout_s, clock or SystemClock())
    except BaseException:
        machine.move(State.RUNNING)
        raise
    try:
        report = let_go(cache, connector, times_s)
    finally:
        machine.move(State.ASLEEP)
    logger.info(
        "KV cache asleep: %d bytes given back, %d pinned by others; unregistered in %.3f s.",
        report.given_back,
        report.pinned,
        times_s.get("unregister", 0.0),
    )
    return report


def wake(cache: GrowableKVCache, connector: SleepsWithPeers | None = None) -> WakeReport:
    """Take memory for as many blocks as there were, all zero, and let peers come back.

    In this order: commit; register; publish the new generation; only then accept transfers.

    Raises:
        OutOfMemoryError: the message says how many bytes are missing. The cache stays asleep and can be woken later.
        StateError: the cache is not asleep.
        ConnectorError: registering failed. The memory is given back again and the cache stays asleep.
    """
    machine = machine_of(cache)
    machine.require(State.ASLEEP, "wake")
    report = take_back(cache, connector)
    machine.move(State.RUNNING)
    logger.info("KV cache awake: %d blocks, generation %d.", report.blocks, report.generation)
    return report


def drain(connector: SleepsWithPeers | None, mode: SleepMode, timeout_s: float, clock: WaitingClock) -> None:
    """Return with transfers refused and nobody holding blocks; else let them begin again and raise LeasesHeldError."""
    if connector is None:
        return
    connector.refuse_transfers()
    try:
        _wait_for_holders(connector, mode, timeout_s, clock)
    except BaseException:
        connector.resume_transfers()
        raise


def _wait_for_holders(connector: SleepsWithPeers, mode: SleepMode, timeout_s: float, clock: WaitingClock) -> None:
    held = tuple(connector.holders())
    if held and mode == "abort":
        connector.abort_transfers("the engine goes to sleep")
        held = tuple(connector.holders())
    deadline = clock.monotonic() + (0.0 if mode == "refuse" else timeout_s)
    while held:
        left = deadline - clock.monotonic()
        if left <= 0:
            raise LeasesHeldError(_why_held(held, mode, timeout_s), holders=held)
        clock.sleep(min(POLL_S, left))
        held = tuple(connector.holders())


def _why_held(held: tuple[str, ...], mode: SleepMode, timeout_s: float) -> str:
    names = ", ".join(held[:8]) + (", ..." if len(held) > 8 else "")
    waited = "" if mode == "refuse" else f" after {timeout_s:g} s"
    return f"{len(held)} request(s) hold blocks of the KV cache{waited}: {names}; wait until they have ended."


def let_go(cache: GrowableKVCache, connector: SleepsWithPeers | None, times_s: dict[str, float]) -> SleepReport:
    """Tell peers, unregister, release. Nothing is released where unregistering failed."""
    told = True
    machine_of(cache).bytes_asleep = cache.physical_bytes
    if connector is not None:
        with timed(times_s, "withdraw"):
            told = _tell_peers(connector)
        with timed(times_s, "unregister"):
            connector.unregister_kv_cache()
    with timed(times_s, "release"):
        released = cache.release_physical()
    return SleepReport(released.released, released.given_back, released.pinned, told, times_s)


def _tell_peers(connector: SleepsWithPeers) -> bool:
    """Peers may be dead or deaf; what protects this engine is that nothing is registered any more."""
    try:
        connector.withdraw()
    except ConnectorError:
        logger.warning("Peers could not be told that the KV cache goes away; going on.", exc_info=True)
        return False
    return True


def take_back(cache: GrowableKVCache, connector: SleepsWithPeers | None) -> WakeReport:
    """Commit, register, publish, accept. A failure leaves the cache released and nothing registered."""
    times_s: dict[str, float] = {}
    with timed(times_s, "commit"):
        _recommit(cache)
    if connector is not None:
        with timed(times_s, "register"):
            _register_or_release(cache, connector)
        with timed(times_s, "publish"):
            connector.publish(cache.generation)
        connector.resume_transfers()
    return WakeReport(cache.num_committed_blocks, cache.generation, cache.physical_bytes, times_s)


def _recommit(cache: GrowableKVCache) -> None:
    if not cache.is_released:  # unregistering had failed, so that nothing was released
        return
    wanted = machine_of(cache).bytes_asleep
    try:
        cache.recommit()
    except OutOfMemoryError as error:
        free = cache.driver.memory_info().free
        wanted = max(wanted, error.wanted)
        raise OutOfMemoryError(
            f"waking the KV cache takes {wanted} bytes and {free} are free: {max(0, wanted - free)} bytes are missing; "
            "the cache stays asleep. Free that much and wake it again.",
            wanted=wanted,
            free=free,
        ) from error


def _register_or_release(cache: GrowableKVCache, connector: SleepsWithPeers) -> None:
    connector.unregister_kv_cache()  # does nothing, unless it failed when the cache went to sleep
    try:
        register(connector, cache)
    except BaseException:
        cache.release_physical()
        raise
