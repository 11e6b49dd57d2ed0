"""The deployments that a benchmark compares: started once each, measured in turn, frozen while another has its turn.

A frozen side (SIGSTOP to all its processes) takes no core, so that all can be up at once and turns can be short. Only
that makes a difference of a few percent visible on a machine whose speed drifts by more.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _report import format_nbytes

from pdkv.errors import ConfigError
from pdkv.launch.deployment import PDDeployment, StockEngine
from pdkv.launch.settings import PDSettings

#: What is compared, in the order of the printed columns.
KINDS = {
    "aggregated": "one stock vLLM",
    "stock-pd": "stock vLLM, prefill + decode, its own NixlConnector",
    "pdkv-pd": "prefill + decode with pdkv",
}
# What vLLM's three processes take beside weights and KV cache; 1.6 GiB were measured with the small model.
ENGINE_BYTES = 1800 << 20
SETTLE_S = 3.0  # for what an engine still does after its last answer, before it counts as idle


@dataclass
class Side:
    """One deployment, started.

    Attributes:
        kind: a key of :data:`KINDS`.
        url: where clients connect.
        start_s: seconds from the start of its first process until all were ready.
    """

    kind: str
    deployment: StockEngine | PDDeployment
    url: str
    start_s: float

    @property
    def names(self) -> list[str]:
        """Its processes: engines, and the proxy."""
        return [command.name for command in self.deployment.commands]

    def processes(self, name: str) -> list[psutil.Process]:
        """The process tree of one of :attr:`names`, below its guard."""
        return psutil.Process(self.deployment.pid(name)).children(recursive=True)

    def freeze(self) -> None:
        """Stop all processes but the guards, which end everything should this process die."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Runs while the block runs."""
        self.thaw()
        try:
            yield
        finally:
            self.freeze()

    def idle_cpu(self, seconds: float) -> dict[str, float]:
        """Cores that each process tree takes while nothing is asked of it; 0.05 is 5 % of one core."""
        time.sleep(SETTLE_S)
        before = {name: self._cpu_seconds(name) for name in self.names}
        began = time.perf_counter()
        time.sleep(seconds)
        took = time.perf_counter() - began
        return {name: (self._cpu_seconds(name) - before[name]) / took for name in self.names}

    def others_seconds(self) -> float:
        """CPU seconds since boot that this machine has spent on anything but this side and this process."""
        times, own = psutil.cpu_times(), psutil.Process().cpu_times()
        busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        return busy - own.user - own.system - sum(self._cpu_seconds(name) for name in self.names)

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory of each process tree in bytes; a page that several share is shared out among them (PSS)."""
        return {name: sum(p.memory_full_info().pss for p in self.processes(name)) for name in self.names}

    def remote_hits(self) -> dict[str, int] | None:
        """Decode's own account of where prompts came from; None for stock vLLM, which keeps none."""
        if self.kind != "pdkv-pd":
            return None
        scheduler = self.deployment.status("decode")["scheduler"] or {}  # type: ignore[call-arg]
        return {name: value for name, value in scheduler.items() if name != "pid"}

    def _cpu_seconds(self, name: str) -> float:
        times = [process.cpu_times() for process in self.processes(name)]
        return sum(t.user + t.system for t in times)

    def _signal(self, signum: int) -> None:
        for name in self.names:
            for process in self.processes(name):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signum)


def build(kind: str, model: Path, log_dir: Path | None, engine: dict[str, Any]) -> StockEngine | PDDeployment:
    """A deployment of one kind, not started; `engine` holds settings of :mod:`pdkv.launch` that all kinds share."""
    folder = None if log_dir is None else log_dir / kind
    if kind == "aggregated":
        return StockEngine(model, log_dir=folder, report=say, **engine)
    own = {"kind": "stock-pd"} if kind == "stock-pd" else {"kind": "pdkv"}
    return PDDeployment(PDSettings.build(model, log_dir=folder, **own, **engine), report=say)


def require_memory(deployments: Iterable[StockEngine | PDDeployment], model: Path, kv_bytes: int) -> None:
    """Refuse to start more than fits: all sides are up at once.

    Raises:
        ConfigError: too little memory is free.
    """
    engines = sum(command.name != "proxy" for deployment in deployments for command in deployment.commands)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    # Twice the file: weights stored in 16 bits are held in float32.
    needed = engines * (ENGINE_BYTES + kv_bytes + 2 * weights)
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"{engines} engines at once take about {format_nbytes(needed)}, {format_nbytes(free)} are free; free some "
            "memory, or leave a kind out with --kinds."
        )


def start(kind: str, deployment: StockEngine | PDDeployment, stack: ExitStack) -> Side:
    """Start one side and leave it frozen; `stack` ends it."""
    say(f"starting {kind}: {KINDS[kind]}")
    began = time.perf_counter()
    stack.enter_context(deployment)
    url = deployment.url if isinstance(deployment, StockEngine) else deployment.proxy_url
    side = Side(kind, deployment, url, time.perf_counter() - began)
    stack.callback(side.thaw)  # a frozen process would not see that it is to end
    side.freeze()
    return side


def say(text: str) -> None:
    """Progress goes to standard error."""
    print(f"serving: {text}", file=sys.stderr, flush=True)
