"""P and D as processes with a fault proxy between them, and what a scenario does with them."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from pdkv.errors import HarnessError
from pdkv.testing.child import Child, ChildEnded
from pdkv.testing.faults.processes.proxy import FaultProxy
from pdkv.testing.faults.processes.toy import true_token
from pdkv.testing.stopping import stop

#: Every deadline of the engines has passed several times by then, on a busy machine too.
PATIENCE_S = 60.0
_POLL_S = 0.02
_NUMBERS = ("schedules", "completed", "wrong_tokens", "leaked_blocks", "crashes", "broken", "ucx_aborts")
#: What UCX says when it ends a process because a peer has died whom it was answering over an emulated transport.
_UCX_ABORT = "unexpected error: Endpoint timeout"


@dataclass(slots=True)
class Totals:
    """What a run came to; the names are those of the simulation's report.

    Attributes:
        broken: scenarios that went wrong.
        ucx_aborts: engines that UCX has ended because their peer had died (docs/failures.md).
    """

    schedules: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    completed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong_tokens: int = 0
    leaked_blocks: int = 0
    crashes: int = 0
    broken: int = 0
    ucx_aborts: int = 0

    @property
    def is_good(self) -> bool:
        """Nothing that must not happen has happened."""
        return not (self.wrong_tokens or self.leaked_blocks or self.crashes or self.broken)

    def add(self, other: Totals) -> None:
        """Count in another run."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults.update(other.faults)
        self.failed.update(other.failed)

    def as_dict(self, seconds: float) -> dict[str, Any]:
        """For JSON."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {**numbers, "faults": dict(self.faults), "failed": dict(self.failed), "seconds": round(seconds, 1)}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that D has got."""

    request_id: str
    prompt: str
    num_tokens: int


class Deployment:
    """Starts engines as they are needed: whoever was killed comes back, as another engine, with the next request.

    Args:
        transport: by its name in the entry-point group ``pdkv.transports``.
        variables: environment of the engines; ``UCX_TLS=tcp`` makes a transfer wait for a stopped peer.
    """

    def __init__(
        self,
        folder: Path,
        *,
        transport: str = "nixl",
        mode: Literal["pull", "push"] = "pull",
        variables: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        self.totals = Totals()
        self.proxy = FaultProxy(seed)
        self.mode = mode
        self._folder, self._transport = folder, transport
        self._variables = {"OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
        self._variables |= variables or {}
        self._engines: dict[str, Child] = {}
        self._starts: Counter[str] = Counter()
        self._stopped: set[str] = set()
        self._asked: dict[str, Asked] = {}
        self._requests = 0

    @property
    def p(self) -> Child:
        return self._engine("P")

    @property
    def d(self) -> Child:
        return self._engine("D")

    # Faults.

    def kill(self, side: str) -> None:
        """SIGKILL. What it knew is gone; the requests that D had, if it was D, are nobody's any more."""
        self._engine(side).process.kill()
        self.was_killed(side)

    def was_killed(self, side: str) -> None:
        """Another process has killed it."""
        self.totals.faults[f"kill_{side}"] += 1
        child = self._engines.pop(side)
        child.process.wait(PATIENCE_S)
        self._stopped.discard(side)
        child.close()
        if side == "D":
            self._asked.clear()

    def stop(self, side: str) -> None:
        """SIGSTOP."""
        stop(self._engine(side).process.pid)
        self.was_stopped(side)

    def was_stopped(self, side: str) -> None:
        """Another process has stopped it."""
        self.totals.faults[f"stop_{side}"] += 1
        self._stopped.add(side)

    def resume(self, side: str) -> None:
        """SIGCONT."""
        os.kill(self._engines[side].process.pid, signal.SIGCONT)
        self._stopped.discard(side)

    def is_stopped(self, side: str) -> bool:
        """Whether it was stopped and has not gone on."""
        return side in self._stopped

    # Requests.

    def prefill(self, num_tokens: int = 100) -> tuple[Asked, dict[str, Any]]:
        """P computes a prompt that nobody has had before; its reference."""
        self._engine("D")  # starting it takes longer than a lease
        self._requests += 1
        asked = Asked(f"request-{self._requests}", f"prompt {self._requests}", num_tokens)
        reference = self.p.ask("prefill", **asdict(asked))
        return asked, reference

    def arrive(self, asked: Asked, reference: dict[str, Any], *, held: bool = False) -> None:
        """The request reaches D."""
        self.d.ask("arrive", **asdict(asked), reference=reference, held=held)
        self._asked[asked.request_id] = asked

    def ask(self, num_tokens: int = 100, *, held: bool = False) -> Asked:
        """A whole request."""
        asked, reference = self.prefill(num_tokens)
        self.arrive(asked, reference, held=held)
        return asked

    def in_flight(self, asked: Asked | None = None) -> bool:
        """Stop the side that does not post a transfer as it is posted; whether the transfer needs that side to end.

        Over tcp it does. Over ipc a READ needs nothing of its owner, and has brought the KV when this returns.
        """
        still = "P" if self.mode == "pull" else "D"
        if asked is None:
            asked = self.ask(held=True)
        self.until(lambda: self.d.ask("knows_lease", request_id=asked.request_id), "D knows P's lease")
        if self.mode == "pull":
            self.stop(still)
            self.d.ask("allocate", request_id=asked.request_id)
        else:  # what makes P write reaches it when D is stopped
            self.proxy.hold(True)
            self.d.ask("allocate", request_id=asked.request_id)
            self.until(lambda: self.proxy.holds(b"REGISTER"), "D asks for its blocks to be written")
            self.stop(still)
            self.proxy.hold(False)
        poster = self.d if self.mode == "pull" else self.p

        def runs() -> bool:
            return bool(poster.ask("state")["transfers"] > 0)

        def has_its_kv() -> bool:  # in push D is the one that is stopped, and answers nobody
            return self.mode == "pull" and asked.request_id in self.d.ask("results")

        self.until(lambda: runs() or has_its_kv(), "a transfer is in flight")
        return not has_its_kv()

    # What must hold.

    def finish(self, *expected: str) -> dict[str, str]:
        """Wait until every request on D has ended; how each did, all of them one of `expected`."""

        def ended() -> bool:
            results = self.d.ask("results")
            return all(results.get(request_id, ["?"])[0] in ("completed", "failed") for request_id in self._asked)

        self.until(ended, "every request ends")
        results = self.d.ask("results")
        ends = {}
        for request_id, asked in self._asked.items():
            how, *more = results[request_id]
            ends[request_id] = how
            if how == "completed":
                self.totals.completed += 1
                truth = [true_token(asked.prompt, asked.num_tokens, step) for step in (0, 1)]
                self.totals.wrong_tokens += sum(token != right for token, right in zip(more, truth, strict=True))
            else:
                self.totals.failed[more[0]] += 1
        self._asked.clear()
        if expected and not set(ends.values()) <= set(expected):
            raise HarnessError(f"requests ended as {ends}, expected {' or '.join(expected)}.")
        return ends

    def no_block_is_held(self) -> None:
        """Every engine that lives has all of its blocks back, waits for nothing, and has not died."""

        def held() -> dict[str, Any]:
            states = {side: child.ask("state") for side, child in self._engines.items() if side not in self._stopped}
            return {
                side: state
                for side, state in states.items()
                if state["leaked"] or state["unfinished"] or state["held_requests"] or state["quarantined_blocks"]
            }

        try:
            self.until(lambda: not held(), "all blocks are back")
        except HarnessError:
            self.totals.leaked_blocks += sum(state["leaked"] for state in held().values())
            raise

    def serves(self) -> None:
        """A request from beginning to end: whoever survived serves the next peer."""
        self.ask()
        self.finish("completed")
        self.no_block_is_held()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for something.

        Raises:
            HarnessError: it did not happen in time, or an engine died that was not killed.
        """
        deadline = time.monotonic() + PATIENCE_S
        with self._noticing_crashes():
            while not holds():
                if time.monotonic() > deadline:
                    raise HarnessError(f"not within {PATIENCE_S:g} s: {what}.\n{self._tails()}")
                time.sleep(_POLL_S)

    def starts_anew_after_ucx(self) -> bool:
        """Whether UCX has ended an engine for its peer's death, of all engines; then others come in their place."""
        if not (aborted := self._aborted_by_ucx()):
            return False
        self.totals.ucx_aborts += len(aborted)
        self._end_engines()
        self._asked.clear()
        self.proxy.calm_down()
        return True

    def _aborted_by_ucx(self) -> list[str]:
        return [
            side
            for side, child in self._engines.items()
            if child.process.poll() == -signal.SIGABRT and _UCX_ABORT in child.tail()
        ]

    def close(self) -> None:
        """End everything."""
        self._end_engines()
        self.proxy.close()
        self.totals.faults.update(self.proxy.injected)

    def _end_engines(self) -> None:
        for side, child in self._engines.items():
            if side in self._stopped:
                with suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGCONT)
            child.process.kill()
            child.close()
        self._engines.clear()
        self._stopped.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Parts.

    def _engine(self, side: str) -> Child:
        """The engine, started where there is none."""
        if side == "D" and "D" not in self._engines:
            self._engine("P")
        if side not in self._engines:
            self._starts[side] += 1
            name = f"{side}/{self._starts[side]}"
            log = self._folder / f"{side}-{self._starts[side]}.log"
            role, peers = ("prefill", "") if side == "P" else ("decode", self.proxy.address)
            child = Child(
                "pdkv.testing.faults.processes.process", log, name, role, self.mode, self._transport, peers,
                environment=self._variables,
            )  # fmt: skip
            self._engines[side] = child
            address = child.ask("address", timeout_s=2 * PATIENCE_S)
            if side == "P":
                self.proxy.forward_to(address)
        return self._engines[side]

    @contextmanager
    def _noticing_crashes(self) -> Iterator[None]:
        try:
            yield
        except (ChildEnded, TimeoutError) as error:
            self.totals.crashes += not self._aborted_by_ucx()
            raise HarnessError(f"an engine that was not killed has died, or answers no more: {error}") from error

    def _tails(self) -> str:
        return "\n".join(f"{side}: {child.tail(8)}" for side, child in self._engines.items())
