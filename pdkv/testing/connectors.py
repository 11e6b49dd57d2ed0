"""What a KV connector must do around sleep and weight updates, in executable form: one check for each rule.

A connector of your own: write a :class:`ConnectorBench` around it, which has a peer that moves blocks, then::

    pdkv.testing.check_connector(lambda: MyBench())

or, rule by rule under pytest, ``run_connector_check(rule, factory)`` for each of ``CONNECTOR_CHECKS``. Each check takes
the connector through a part of: register, transfer, unregister, release, stale transfer, recommit, restore, transfer;
what is registered is compared with the extents of the cache at every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pdkv.errors import ExtentError, PdkvError
from pdkv.kvcache import find_extent
from pdkv.testing.rules import BrokenRuleError, allowed, refused, require

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache
    from pdkv.lifecycle import RegistersKVCache


class ConnectorBench(ABC):
    """An owner of a cache with the connector to be checked, and a peer with which it moves blocks.

    Attributes:
        cache: some blocks committed, fewer than the capacity, one chunk per segment; 3 at least.
        connector: not registered.
        owner_is_source: whether the peer reads from the owner; else it writes.
    """

    cache: GrowableKVCache
    connector: RegistersKVCache
    owner_is_source: bool = True

    @abstractmethod
    def registered(self) -> Sequence[tuple[int, int]]:
        """`(address, nbytes)` of what the transport holds registered of the owner, asked below the connector."""

    @abstractmethod
    def meet(self) -> None:
        """Have the peer take what the owner publishes now, and drop what it knew of it before."""

    @abstractmethod
    def move(self, block: int, value: int) -> bytes:
        """Move one block, all layers, every byte of the source being `value`; what is at the destination afterwards.

        The peer uses what it knows
        since the last :meth:`meet`, and does not ask first whether that still holds.

        Raises:
            PdkvError: it did not happen.
        """

    @abstractmethod
    def owner_is_alive(self) -> bool:
        """Whether the owner's process still answers."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""


BenchFactory = Callable[[], ConnectorBench]

CONNECTOR_CHECKS: dict[str, Callable[[ConnectorBench], None]] = {}
"""All checks by the name of their rule, in the order in which :func:`check_connector` runs them."""


def check_connector(factory: BenchFactory) -> None:
    """Hold a connector to the whole contract.

    Args:
        factory: a fresh bench; called once for each rule.

    Raises:
        BrokenRuleError: the first rule that is broken, by name, and what was seen.
    """
    for rule in CONNECTOR_CHECKS:
        run_connector_check(rule, factory)


def run_connector_check(rule: str, factory: BenchFactory) -> None:
    """Hold a connector to one rule, a key of :data:`CONNECTOR_CHECKS`."""
    bench = factory()
    try:
        with allowed("an allowed call"):
            CONNECTOR_CHECKS[rule](bench)
    except BrokenRuleError as error:
        raise BrokenRuleError(f"{rule}: {error}") from error
    finally:
        bench.close()


def _check(function: Callable[[ConnectorBench], None]) -> Callable[[ConnectorBench], None]:
    CONNECTOR_CHECKS[function.__name__] = function
    return function


# Steps.


def _register(bench: ConnectorBench) -> None:
    bench.connector.register_kv_cache(bench.cache)
    _require_extents(bench)
    bench.meet()


def _unregister(bench: ConnectorBench) -> None:
    bench.connector.unregister_kv_cache()
    require(not bench.registered(), f"unregistering drops every registration, but {bench.registered()} is left")


def _sleep(bench: ConnectorBench) -> None:
    _unregister(bench)
    bench.cache.release_physical()


def _wake(bench: ConnectorBench) -> None:
    bench.cache.recommit()
    bench.connector.register_kv_cache(bench.cache)
    _require_extents(bench)


def _require_extents(bench: ConnectorBench) -> None:
    """I5, I6: only committed memory, nothing over a chunk's border; and nothing at all where that was announced."""
    registered = list(bench.registered())
    if not bench.connector.registers_memory:
        require(not registered, "a connector with registers_memory = False registers nothing of the cache")
        return
    extents = bench.cache.extents()
    for address, nbytes in registered:
        try:
            find_extent(extents, address, nbytes)
        except ExtentError as error:
            raise BrokenRuleError(f"only extents are registered: {error}") from error
    require(registered, "a connector with registers_memory = True registers something of the cache")
    require(len(set(registered)) == len(registered), "nothing is registered twice")


def _require_moves(bench: ConnectorBench, when: str, value: int) -> None:
    for block in (1, bench.cache.num_committed_blocks - 1):
        found = bench.move(block, value)
        differing = sum(byte != value for byte in found)
        require(found and not differing, f"block {block} arrives whole {when}; {differing} of its bytes are wrong")


def _require_no_move(bench: ConnectorBench, when: str) -> None:
    with refused(f"a peer that was told nothing moves nothing {when}", PdkvError):
        bench.move(1, 0x5A)
    require(bench.owner_is_alive(), f"the owner lives on when such a peer tries {when}")


# Rules.


@_check
def registers_extents_and_nothing_else(bench: ConnectorBench) -> None:
    _register(bench)


@_check
def moves_the_first_and_the_last_block_whole(bench: ConnectorBench) -> None:
    _register(bench)
    _require_moves(bench, "after registering", 0x21)


@_check
def drops_all_registrations_when_told_to(bench: ConnectorBench) -> None:
    _register(bench)
    _unregister(bench)


@_check
def may_be_told_to_unregister_twice_and_before_it_has_registered(bench: ConnectorBench) -> None:
    bench.connector.unregister_kv_cache()
    _register(bench)
    _unregister(bench)
    with allowed("unregistering twice"):
        _unregister(bench)


@_check
def keeps_no_memory_from_coming_free(bench: ConnectorBench) -> None:
    _register(bench)
    _require_moves(bench, "before the release", 0x22)
    _unregister(bench)
    report = bench.cache.release_physical()
    require(not report.pinned, f"the memory comes free after unregistering, but {report.pinned} bytes are pinned")


@_check
def serves_no_peer_that_was_told_nothing_while_memory_is_released(bench: ConnectorBench) -> None:
    _register(bench)
    _require_moves(bench, "before the release", 0x23)
    _sleep(bench)
    _require_no_move(bench, "while memory is released")
    require(not bench.cache.physical_bytes, "no memory comes back by itself")


@_check
def serves_no_peer_that_was_told_nothing_after_memory_is_back(bench: ConnectorBench) -> None:
    _register(bench)
    _require_moves(bench, "before the release", 0x24)
    _sleep(bench)
    _wake(bench)
    _require_no_move(bench, "after memory was replaced")
    require(
        bench.owner_is_source or not any(bool(view.any()) for view in bench.cache.committed_views().values()),
        "memory that was replaced is zero, whatever such a peer tried",
    )


@_check
def registers_again_and_moves_again_after_each_sleep(bench: ConnectorBench) -> None:
    _register(bench)
    for number in range(2):
        _require_moves(bench, f"before sleep {number}", 0x30 + number)
        _sleep(bench)
        _wake(bench)
        bench.meet()
        _require_moves(bench, f"after sleep {number}", 0x40 + number)


@_check
def registers_what_is_committed_now_or_refuses(bench: ConnectorBench) -> None:
    _register(bench)
    before = bench.cache.num_committed_blocks
    _unregister(bench)
    bench.cache.commit(before - 1, defragment=True, shrink=True)
    try:
        bench.connector.register_kv_cache(bench.cache)
    except PdkvError:
        bench.connector.unregister_kv_cache()
        require(not bench.registered(), "a registration that was refused leaves nothing registered")
        return
    _require_extents(bench)
    bench.meet()
    _require_moves(bench, "after the cache has shrunk", 0x51)


__all__ = ["CONNECTOR_CHECKS", "ConnectorBench", "check_connector", "run_connector_check"]
