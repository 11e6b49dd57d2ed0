"""A connector that writes down what is asked of it, and a clock that needs no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkv.kvcache import GrowableKVCache


class TurnedClock:
    """Time passes where somebody sleeps; `at` holds what happens when it has passed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [entry for entry in self.at if entry[0] <= self.now]:
            self.at.remove(due)
            due[1]()


class RecordingConnector:
    """Registers extents, holds what a test says, and refuses at the step that a test breaks."""

    registers_memory = True

    def __init__(self, cache: GrowableKVCache) -> None:
        self.steps: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.held: list[str] = []
        self.extents: tuple[Any, ...] = ()
        self.published: list[int] = [cache.generation]
        self.accepting = True
        self.register_kv_cache(cache)
        self.steps.clear()

    def step(self, name: str) -> None:
        self.steps.append(name)
        if name in self.broken:
            raise self.broken[name]

    def refuse_transfers(self) -> None:
        self.accepting = False
        self.step("refuse")

    def holders(self) -> tuple[str, ...]:
        return tuple(self.held)

    def abort_transfers(self, reason: str) -> None:
        self.step("abort")

    def withdraw(self) -> None:
        self.step("withdraw")

    def unregister_kv_cache(self) -> None:
        self.step("unregister")
        self.extents = ()

    def register_kv_cache(self, cache: GrowableKVCache) -> None:
        assert self.extents == ()
        self.step("register")
        self.extents = cache.extents()

    def publish(self, generation: int) -> None:
        assert not self.accepting
        self.step("publish")
        self.published.append(generation)

    def resume_transfers(self) -> None:
        self.step("resume")
        self.accepting = True
