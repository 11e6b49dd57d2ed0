"""Any sequence of commits, releases and failures, against a model that knows what each block holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvcache_strategies import GRANULE, block_bytes, committed_range, configs, fill, os_mappings

from pdkv.errors import DriverError, StateError
from pdkv.kvcache import GrowableKVCache, KVCacheConfig
from pdkv.memory import HostDriver
from pdkv.memory.wrappers import FailingDriver, LimitedDriver, out_of_memory

pytestmark = pytest.mark.cpu

FALLIBLE = st.sampled_from(["create", "map", "unmap", "zero", "copy", "release", "reserve", "synchronize"])


class CacheMachine(RuleBasedStateMachine):
    """`held` is the model: what every byte of each committed block is."""

    @initialize(config=configs(), generosity=st.sampled_from([1.0, 1.3, 3.0]))
    def build(self, config: KVCacheConfig, generosity: float) -> None:
        self.failing = FailingDriver(HostDriver(GRANULE))
        driver = LimitedDriver(self.failing, int(config.padded(GRANULE).size * generosity))
        self.cache = GrowableKVCache(config, driver)
        self.addresses = {name: view.data_ptr() for name, view in self.cache.views().items()}
        self.held: list[int] = []
        self.generation = 0

    def change(self, wanted: int, action: Callable[[], object], *, keeps: bool) -> None:
        """Carry out a commit to `wanted` blocks. `keeps` tells whether contents survive where memory is replaced."""
        before = len(self.held)
        try:
            action()
        except DriverError:
            assert self.cache.num_committed_blocks == min(before, self.cache.num_committed_blocks)
            if self.failing.failures <= 1 and wanted >= before:
                assert self.cache.num_committed_blocks == before
        else:
            assert self.cache.num_committed_blocks == wanted
        after = self.cache.num_committed_blocks
        replaced = self.cache.generation != self.generation
        assert self.cache.generation - self.generation in (0, 1)
        kept = [] if replaced and not keeps else self.held[:after]
        self.held = kept + [0] * (after - len(kept))
        self.generation = self.cache.generation

    def target(self, count: int, shrink: bool) -> int:
        clamped = min(count, self.cache.capacity_blocks)
        return clamped if shrink else max(clamped, len(self.held))

    @precondition(lambda self: not self.cache.is_released)
    @rule(count=st.integers(0, 10), defragment=st.booleans(), shrink=st.booleans(), preserve=st.booleans())
    def commit(self, count: int, defragment: bool, shrink: bool, preserve: bool) -> None:
        options = {"defragment": defragment, "shrink": shrink, "preserve": preserve}
        self.change(self.target(count, shrink), lambda: self.cache.commit(count, **options), keeps=preserve)

    @precondition(lambda self: not self.cache.is_released)
    @rule(
        count=st.integers(0, 10),
        defragment=st.booleans(),
        preserve=st.booleans(),
        kind=FALLIBLE,
        nth=st.integers(1, 6),
        memory=st.booleans(),
    )
    def commit_with_a_failure(
        self, count: int, defragment: bool, preserve: bool, kind: str, nth: int, memory: bool
    ) -> None:
        self.failing.failures = 0
        self.failing.fail(kind, nth, error=out_of_memory if memory else None)
        self.change(
            self.target(count, False),
            lambda: self.cache.commit(count, defragment=defragment, preserve=preserve),
            keeps=preserve,
        )
        self.failing.relent()

    @precondition(lambda self: not self.cache.is_released)
    @rule(value=st.integers(1, 127))
    def write(self, value: int) -> None:
        for view in self.cache.views().values():
            for block in range(len(self.held)):
                fill(view, block, (value + block) % 128)
        self.held = [(value + block) % 128 for block in range(len(self.held))]

    @precondition(lambda self: not self.cache.is_released)
    @rule()
    def sleep(self) -> None:
        self.asleep = len(self.held)
        self.cache.release_physical()
        assert self.cache.generation == self.generation + bool(self.asleep)
        self.generation = self.cache.generation
        self.held = []
        with pytest.raises(StateError):
            self.cache.commit(1)

    @precondition(lambda self: self.cache.is_released)
    @rule()
    def wake(self) -> None:
        self.cache.recommit()
        self.held = [0] * self.asleep
        assert self.cache.generation == self.generation
        assert self.cache.chunks_per_segment() == bool(self.asleep)

    @invariant()
    def addresses_stay(self) -> None:
        assert {name: view.data_ptr() for name, view in self.cache.views().items()} == self.addresses

    @invariant()
    def blocks_hold_what_they_should(self) -> None:
        for name, view in self.cache.views().items():
            for block, value in enumerate(self.held):
                assert block_bytes(view, block).unique().tolist() == [value], (name, block)

    @invariant()
    def extents_are_the_committed_bytes_in_single_chunks(self) -> None:
        extents = self.cache.extents()
        for segment in range(len(self.cache.segments)):
            mine = [extent for extent in extents if extent.segment == segment]
            assert sum(extent.nbytes for extent in mine) == committed_range(self.cache, segment)[1]
        for extent in extents:
            (mapping,) = os_mappings(extent.address, extent.nbytes)
            assert mapping.begin <= extent.address
            assert extent.end <= mapping.end

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.failing.relent()
            self.cache.close()
            assert os_mappings(self.cache.address, self.cache.bytes_reserved) == []


def test_I1_to_I7_hold_through_any_sequence_of_commits_releases_and_failures() -> None:
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=60, stateful_step_count=14, deadline=None))
