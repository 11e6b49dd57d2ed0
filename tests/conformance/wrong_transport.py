"""What a wrong transport is made of, and the list of all: each with the rule of the suite that catches it."""

from __future__ import annotations

from collections.abc import Callable

from pdkv.transfer.inproc import InprocTransport


class Wrong(InprocTransport):
    """The in-process transport with one mistake, made by a subclass."""

    def __init__(self) -> None:
        super().__init__(copies_per_poll=3)


WRONG: list[tuple[str, type[Wrong]]] = []


def caught_by(rule: str) -> Callable[[type[Wrong]], type[Wrong]]:
    def register(transport: type[Wrong]) -> type[Wrong]:
        WRONG.append((rule, transport))
        return transport

    return register
