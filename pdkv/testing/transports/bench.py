"""Two sides of a transport, in this process or in two of their own, and the steps that checks take with them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Protocol, Self

import pdkv.errors
from pdkv.errors import ConfigError, PdkvError
from pdkv.testing.child import Child, ChildError
from pdkv.testing.rules import require
from pdkv.testing.stopping import stopped
from pdkv.testing.transports.side import TransportFactory, TransportSide

#: A transfer of a few hundred KiB takes milliseconds; the rest is for a machine that is busy with something else.
DEADLINE_S = 30.0
#: A process imports torch with its first commands, which takes more than a minute where others do so too.
START_TIMEOUT_S = 180.0

Pairs = Sequence[tuple[int, int, int]]
#: Neighbours on both sides, on one side, on none, descending; over chunk borders; the first and the last block.
SCATTERED: Pairs = (
    (0, 3, 10), (0, 4, 11), (0, 5, 12), (0, 6, 30), (0, 9, 13), (0, 39, 0), (0, 0, 39), (0, 19, 20), (0, 20, 21),
    (0, 21, 19), (0, 33, 5),
)  # fmt: skip


class Side(Protocol):
    """Takes the commands of :class:`TransportSide` by name."""

    def ask(self, do: str, **arguments: Any) -> Any: ...

    def close(self) -> None: ...


class LocalSide:
    """In this process."""

    def __init__(self, factory: TransportFactory, driver: str) -> None:
        self._side = TransportSide(factory, driver)

    def ask(self, do: str, **arguments: Any) -> Any:
        return getattr(self._side, f"do_{do}")(**arguments)

    def close(self) -> None:
        return


class RemoteSide(Child):
    """In a process of its own; errors of pdkv's come back as what they were."""

    def __init__(self, factory: str, driver: str, log: Path, environment: Mapping[str, str]) -> None:
        module = "pdkv.testing.transports.process"
        super().__init__(module, log, factory, driver, environment=dict(environment))

    def ask(self, do: str, timeout_s: float = START_TIMEOUT_S, **arguments: Any) -> Any:
        try:
            return super().ask(do, timeout_s, **arguments)
        except ChildError as error:
            kind = getattr(pdkv.errors, error.kind, None)
            if isinstance(kind, type) and issubclass(kind, PdkvError):
                raise kind(str(error)) from error
            raise


class TransportBench:
    """P, the owner, and D, the initiator.

    Args:
        factory: makes a transport; as ``module:function`` where each side gets a process of its own.
        processes: 1 or 2.
        driver: the memory driver of both caches.
        environment: variables for the two processes.
        d_environment: more variables for D's.
    """

    def __init__(
        self,
        factory: TransportFactory | str,
        *,
        processes: int = 1,
        driver: str = "host",
        environment: Mapping[str, str] | None = None,
        d_environment: Mapping[str, str] | None = None,
    ) -> None:
        if (processes == 2) != isinstance(factory, str):
            raise ConfigError("give the factory as 'module:function' for two processes, and as a function for one.")
        self._stack = ExitStack()
        if isinstance(factory, str):
            folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="pdkv-transport-")))
            self.p: Side = RemoteSide(factory, driver, folder / "p.log", environment or {})
            self._stack.callback(self.p.close)
            d_variables = {**(environment or {}), **(d_environment or {})}
            self.d: Side = RemoteSide(factory, driver, folder / "d.log", d_variables)
            self._stack.callback(self.d.close)
        else:
            self.p, self.d = LocalSide(factory, driver), LocalSide(factory, driver)
        self.processes = processes
        self.what: dict[str, Any] = {}
        self._page_nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # Steps.

    def open(self) -> None:
        """A new transport on either side."""
        granules = []
        for side in (self.p, self.d):
            self.what = side.ask("open")
            granules.append(self.what["granule"])
        # No divisor of a granule, so that blocks lie across the borders of chunks.
        self._page_nbytes = max(granules) * 3 // (8 if max(granules) <= 65_536 else 32)

    def finish(self) -> None:
        """Give everything back."""
        for side in (self.d, self.p):
            side.ask("finish")

    def build(self, side: Side, seed: int, **shape: Any) -> None:
        """A cache filled with noise."""
        side.ask("build", **{"page_nbytes": self._page_nbytes, **shape})
        side.ask("fill", seed=seed)

    def meet(self, groups: list[list[str]] | None = None, **shape: Any) -> None:
        """Caches on both sides (P's of seed 1, D's of seed 2), registered in generation 1; D knows P, and P knows D."""
        for side, name, seed in ((self.p, "P", 1), (self.d, "D", 2)):
            self.build(side, seed, **shape)
            side.ask("register", engine=name, generation=1, groups=groups)
        self.introduce()

    def introduce(self, p_generation: int = 1) -> None:
        """Each is told of the other."""
        self.d.ask("connect", engine="P", generation=p_generation, metadata=self.p.ask("describe"))
        self.p.ask("connect", engine="D", generation=1, metadata=self.d.ask("describe"))

    @property
    def large_page_nbytes(self) -> int:
        """Bytes of a page for a cache whose 40 blocks in three layers take 11 MiB or more."""
        return self._page_nbytes * (65 if self._page_nbytes < 65_536 else 1)

    @contextmanager
    def meanwhile(self, side: Side, do: str, **arguments: Any) -> Iterator[Future[Any]]:
        """What a side answers to a command that it works on while the block runs, which asks it for nothing else."""
        with ThreadPoolExecutor(1) as thread:
            yield thread.submit(side.ask, do, **arguments)

    def hanging(self, side: Side) -> AbstractContextManager[None]:
        """A side that does nothing by itself: its process is stopped, and in this one nobody calls it."""
        return stopped(side.process.pid) if isinstance(side, RemoteSide) else nullcontext()

    def renew(self) -> None:
        """P in generation 2, of which D knows: other contents (seed 3) in new memory; D's are as they were."""
        self.p.ask("unregister")
        self.p.ask("release")
        self.p.ask("recommit")
        self.p.ask("fill", seed=3)
        self.d.ask("fill", seed=2)
        self.p.ask("register", engine="P", generation=2)
        self.introduce(p_generation=2)

    def post(self, pairs: Pairs, *, reads: bool = True, generation: int = 1) -> int:
        """D reads from P, or P writes to D; the number of the transfer on its initiator's side."""
        side, peer = (self.d, "P") if reads else (self.p, "D")
        number: int = side.ask("post", engine=peer, generation=generation, pairs=[*map(list, pairs)], reads=reads)
        return number

    def ended(self, number: int, *, reads: bool = True) -> str:
        """The state in which a transfer ends; it breaks a rule not to end."""
        side, other = (self.d, self.p) if reads else (self.p, self.d)
        deadline = time.monotonic() + DEADLINE_S
        while (state := str(side.ask("poll", number=number))) == "running":
            require(time.monotonic() < deadline, f"a transfer ends within {DEADLINE_S:g} s")
            if self.processes == 1:
                other.ask("progress")
        return state

    def move(self, pairs: Pairs, *, reads: bool = True, generation: int = 1) -> None:
        """Post a transfer that must come to a good end."""
        number = self.post(pairs, reads=reads, generation=generation)
        state = self.ended(number, reads=reads)
        side = self.d if reads else self.p
        require(state == "done", f"the transfer ends as done, not {state}: {side.ask('reason', number=number)}")

    def require_moved(self, pairs: Pairs, *, seed: int = 1, layers: Iterable[int] = ()) -> None:
        """D holds P's blocks where they were to go, its own everywhere else, and P what it held."""
        moved = {str(to): [seed, source, *layers] for _, source, to in pairs}
        wrong = self.d.ask("differing", seed=2, moved=moved)
        places = f"[layer, block] {wrong[:6]}"
        require(not wrong, f"the named blocks hold the peer's bytes and no other byte is changed; wrong: {places}")
        require(not self.p.ask("differing", seed=seed), "the source is left as it was")
