"""Pairs with ipc transports: of processes, for the tests on the host and on CUDA, and within this one on the host."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdkv.testing.child import Child
from pdkv.testing.stopping import stop
from pdkv.testing.transports.side import TransportSide
from pdkv_connectors.ipc import IpcTransport

HERE = Path(__file__).parent
DEADLINE_S = 30.0
START_TIMEOUT_S = 180.0  # a process imports torch, which takes a minute where others do so too
BLOCKS = 40  # of which the side's cache commits 20 and then 40


class Peer(Child):
    """One process."""

    def __init__(self, name: str, folder: Path, driver: str, *options: str) -> None:
        root = HERE.parents[2]
        paths = [str(root), str(root / "connectors"), os.environ.get("PYTHONPATH", "")]
        # One thread: on few cores those of torch would spin against each other.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        super().__init__(HERE / "ipc_side_main.py", folder / f"{name}.log", driver, *options, environment=environment)
        self.name = name

    def ask(self, do: str, timeout_s: float = START_TIMEOUT_S, **arguments: Any) -> Any:
        return super().ask(do, timeout_s, **arguments)

    def meet(self, other: Peer, generation: int = 1, heads: list[int] | None = None) -> None:
        """Connect to a peer that has registered; for `heads` as in :class:`HeadSlice`."""
        metadata = other.ask("describe")
        self.ask("connect", engine=other.name, generation=generation, metadata=metadata, heads=heads)

    def read(self, other: Peer, pairs: list[tuple[int, int]], generation: int = 1) -> str:
        """Read blocks of group 0; the state in which that ends."""
        number = self.post(other, pairs, generation)
        return str(self.ask("wait", number=number, within_s=DEADLINE_S))

    def post(self, other: Peer, pairs: list[tuple[int, int]], generation: int = 1) -> int:
        named = [[0, *pair] for pair in pairs]
        return int(self.ask("post", engine=other.name, generation=generation, pairs=named, reads=True))

    def stop(self) -> None:
        """Let it run no more until it gets SIGCONT."""
        stop(self.process.pid)

    def kill(self) -> None:
        """End it without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)


@contextmanager
def peers(
    folder: Path, driver: str, names: str = "PD", *, verify: bool = True, page: int = 8192
) -> Iterator[list[Peer]]:
    """One process for each name, each with a cache full of noise (seed 1, 2, ..) that is registered in generation 1."""
    options = () if verify else ("verify=0",)
    found = [Peer(name, folder, driver, *options) for name in names]
    try:
        for seed, peer in enumerate(found, 1):
            peer.ask("open")
            peer.ask("build", page_nbytes=page)
            peer.ask("fill", seed=seed)
            peer.ask("register", engine=peer.name, generation=1)
        yield found
    finally:
        for peer in found:
            peer.close()


def until(what: Callable[[], Any], wanted: Callable[[Any], bool]) -> Any:
    """Ask until the answer is as wanted, or the deadline has passed; the last answer."""
    end = time.monotonic() + DEADLINE_S
    while not wanted(found := what()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


@contextmanager
def registered(page_nbytes: int = 8192, *, layers: int = 3) -> Iterator[tuple[TransportSide, TransportSide]]:
    """P and D in this process, each with a cache that is registered; they do not know each other."""
    p, d = (TransportSide(lambda: IpcTransport(drop_timeout_s=2.0)) for _ in range(2))
    for name, side in (("P", p), ("D", d)):
        side.do_open()
        side.do_build(page_nbytes, layers=layers)
        side.do_register(name, 1)
    yield p, d
    for side in (p, d):
        side.do_finish()
