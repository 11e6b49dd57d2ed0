"""The connector conformance suite: right connectors pass it, and each wrong one is caught by the rule it breaks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest

from pdkv.errors import TransportError
from pdkv.kvcache import GrowableKVCache, KVCacheConfig, PageSpec
from pdkv.memory import HostDriver
from pdkv.testing import (
    CONNECTOR_CHECKS,
    BrokenRuleError,
    ConnectorBench,
    check_connector,
    run_connector_check,
)
from pdkv.testing.transport_connector import TransportConnectorBench
from pdkv.transfer.inproc import InprocTransport

pytestmark = pytest.mark.cpu

GRANULE = 4096
PAGE = PageSpec(num_heads=2, num_states=4, content_bytes=100, block_size=4)

RIGHT: dict[str, Callable[[], ConnectorBench]] = {
    "inproc, peer reads": lambda: TransportConnectorBench(InprocTransport, HostDriver(GRANULE)),
    "inproc, peer writes": lambda: TransportConnectorBench(InprocTransport, HostDriver(GRANULE), reads=False),
}


@pytest.mark.parametrize("rule", CONNECTOR_CHECKS)
@pytest.mark.parametrize("factory", RIGHT.values(), ids=RIGHT)
def test_connector_keeps_to_the_rule(factory: Callable[[], ConnectorBench], rule: str) -> None:
    run_connector_check(rule, factory)


class Naive:
    """A connector over plain memory: registered ranges, a peer that copies from them, and one mistake of a subclass."""

    registers_memory = True

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.epoch = 0  # of the registration; a peer holds the one that it met
        self.held: list[int] = []

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        self.cache = cache
        self.ranges = self.what(cache)
        self.epoch += 1

    def what(self, cache: GrowableKVCache) -> list[tuple[int, int]]:
        return [(extent.address, extent.nbytes) for extent in cache.extents()]

    def unregister_kv_cache(self) -> None:
        self.ranges = []

    def serves(self, epoch: int) -> bool:
        return bool(self.ranges) and epoch == self.epoch

    def copied(self, data: bytes) -> bytes:
        return data

    def close(self) -> None:
        for fd in self.held:
            os.close(fd)
        self.held.clear()


class NaiveBench(ConnectorBench):
    def __init__(self, connector: Naive) -> None:
        self.cache = GrowableKVCache(KVCacheConfig.uniform(("a", "b"), PAGE, 32), HostDriver(GRANULE))
        self.cache.commit(12, defragment=True)
        self.connector = self.owner = connector
        self.known = 0
        self.alive = True

    def registered(self) -> Sequence[tuple[int, int]]:
        return self.owner.ranges

    def meet(self) -> None:
        self.known = self.owner.epoch

    def move(self, block: int, value: int) -> bytes:
        if not self.owner.serves(self.known):
            raise TransportError("the peer is not connected in this generation.")
        if not self.cache.num_committed_blocks:
            self.alive = False  # where a real owner would have died of SIGSEGV
            return bytes(1)
        views = self.cache.committed_views().values()
        for view in views:
            view[block].fill_(value)
        return self.owner.copied(b"".join(view[block].contiguous().numpy().tobytes() for view in views))

    def owner_is_alive(self) -> bool:
        return self.alive

    def close(self) -> None:
        self.owner.close()
        self.cache.close()


def test_the_naive_connector_without_a_mistake_passes() -> None:
    check_connector(lambda: NaiveBench(Naive()))


WRONG: list[tuple[str, type[Naive]]] = []


def caught_by(rule: str) -> Callable[[type[Naive]], type[Naive]]:
    def register(connector: type[Naive]) -> type[Naive]:
        WRONG.append((rule, connector))
        return connector

    return register


@caught_by("registers_extents_and_nothing_else")
class RegistersTheCapacity(Naive):
    def what(self, cache: GrowableKVCache) -> list[tuple[int, int]]:
        return [(cache.address, cache.bytes_reserved)]


@caught_by("registers_extents_and_nothing_else")
class RegistersTheWholeLastGranule(Naive):
    def what(self, cache: GrowableKVCache) -> list[tuple[int, int]]:
        return [(address, -(-nbytes // GRANULE) * GRANULE) for address, nbytes in super().what(cache)]


@caught_by("registers_extents_and_nothing_else")
class SaysThatItRegistersNothing(Naive):
    registers_memory = False


@caught_by("registers_extents_and_nothing_else")
class RegistersTwice(Naive):
    def what(self, cache: GrowableKVCache) -> list[tuple[int, int]]:
        return super().what(cache) * 2


@caught_by("moves_the_first_and_the_last_block_whole")
class LosesTheLastByte(Naive):
    def copied(self, data: bytes) -> bytes:
        return data[:-1] + b"\0"


@caught_by("drops_all_registrations_when_told_to")
class ForgetsOneRegistration(Naive):
    def unregister_kv_cache(self) -> None:
        self.ranges = self.ranges[:1]


@caught_by("may_be_told_to_unregister_twice_and_before_it_has_registered")
class UnregistersOnceOnly(Naive):
    def unregister_kv_cache(self) -> None:
        if not self.ranges:
            raise TransportError("nothing is registered.")
        super().unregister_kv_cache()


@caught_by("keeps_no_memory_from_coming_free")
class KeepsADescriptorOfTheMemory(Naive):
    """As a transport does that has exported a chunk for peers."""

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        super().register_kv_cache(cache)
        self.held += [fd for _, fd in cache._backing._reservation.export_fds()]


@caught_by("serves_no_peer_that_was_told_nothing_while_memory_is_released")
class ServesWhileReleased(Naive):
    def serves(self, epoch: int) -> bool:
        return epoch == self.epoch


@caught_by("serves_no_peer_that_was_told_nothing_after_memory_is_back")
class ServesOldGenerations(Naive):
    def serves(self, epoch: int) -> bool:
        return bool(self.ranges)


@caught_by("registers_again_and_moves_again_after_each_sleep")
class WorksAfterOneSleepOnly(Naive):
    def serves(self, epoch: int) -> bool:
        return super().serves(epoch) and self.epoch < 3


@caught_by("registers_what_is_committed_now_or_refuses")
class RemembersTheFirstExtents(Naive):
    first: list[tuple[int, int]] | None = None

    def what(self, cache: GrowableKVCache) -> list[tuple[int, int]]:
        if self.first is None:
            self.first = super().what(cache)
        return self.first


@pytest.mark.parametrize(("rule", "connector"), WRONG, ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_connector_is_caught_by_the_rule_that_it_breaks(rule: str, connector: type[Naive]) -> None:
    with pytest.raises(BrokenRuleError, match=f"^{rule}: "):
        run_connector_check(rule, lambda: NaiveBench(connector()))


def test_every_rule_has_a_wrong_connector_that_breaks_it() -> None:
    assert {rule for rule, _ in WRONG} == set(CONNECTOR_CHECKS)
