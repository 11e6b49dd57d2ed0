"""What a wrong driver is made of, and the list of all: each with the rule of the conformance suite that catches it."""

from __future__ import annotations

from collections.abc import Callable

from pdkv.memory import ForwardingDriver, HostDriver


class Wrong(ForwardingDriver):
    """A host driver with one mistake, made by a subclass."""

    def __init__(self) -> None:
        super().__init__(HostDriver(4096))


WRONG: list[tuple[str, type[Wrong]]] = []


def caught_by(rule: str) -> Callable[[type[Wrong]], type[Wrong]]:
    def register(driver: type[Wrong]) -> type[Wrong]:
        WRONG.append((rule, driver))
        return driver

    return register
