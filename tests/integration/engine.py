"""Real vLLM engines as child processes, for tests that look inside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from zygote import Zygote

from pdkv.launch.machine import pick_free_ports
from pdkv.testing.child import Child, ChildProcess, Start

READY_TIMEOUT_S = 600.0
COMMAND_TIMEOUT_S = 240.0
_MAIN = Path(__file__).with_name("engine_main.py")

#: vLLM options of all engines in these tests. Float32, since only there equal tokens mean equal KV. No tokenizer, since
#: prompts and outputs are token ids.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "block_size": 32,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "disable_log_stats": True,
    "skip_tokenizer_init": True,
}
#: Environment of all engines in these tests.
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "PDKV_GRANULE": "65536",
}
GROWABLE = {"worker_cls": "pdkv_connectors.vllm.worker.GrowableCPUWorker"}


def nixl_connector(role: str, mode: str = "Pull", *, stock: bool = False, **more: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for a NIXL connector, "Pull" or "Push", pdkv's or vLLM's own; `more` keys of it."""
    config: dict[str, Any] = {
        "kv_connector": f"Nixl{mode}Connector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        **more,
    }
    if not stock:
        config["kv_connector"] = f"PdkvNixl{mode}Connector"
        config["kv_connector_module_path"] = "pdkv_connectors.vllm.nixl"
    return {"kv_transfer_config": config}


def pdkv_connector(
    role: str, side_channel: int, *, transport: str = "auto", own: int | None = None, **extra: Any
) -> dict[str, Any]:
    """`kv_transfer_config` for `PdkvConnector`.

    Args:
        side_channel: the port where prefill listens.
        own: where an engine of both roles listens itself.
        extra: further ``kv_connector_extra_config``, and ``kv_load_failure_policy``.
    """
    where = f"127.0.0.1:{side_channel}"
    channel = {"pdkv_side_channel": where} if role == "kv_producer" else {"pdkv_side_channel_peers": where}
    if own is not None:
        channel["pdkv_side_channel"] = f"127.0.0.1:{own}"
    config = {
        "kv_connector": "PdkvConnector",
        "kv_connector_module_path": "pdkv_connectors.vllm.connector",
        "kv_role": role,
        "kv_load_failure_policy": extra.pop("kv_load_failure_policy", "fail"),
        "kv_connector_extra_config": {"pdkv_transport": transport, **channel, **extra},
    }
    return {"kv_transfer_config": config}


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    return pick_free_ports(["127.0.0.1"])[0]


@contextlib.contextmanager
def running(*engines: EngineProcess) -> Iterator[None]:
    """Engines that have all started. When the context is left all of them end, at the same time."""
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine)
        for engine in engines:
            engine.wait_ready()
        try:
            yield
        finally:
            for engine in engines:
                engine.end()


class EngineProcess(Child):
    """One engine in a child process, ended when the context is left. It starts in the background.

    Args:
        log: where its standard output and error go.
        environment: variables on top of `VARIABLES` and this process's own.
        fresh: start an interpreter for it, also where `zygote` could fork it.
        options: vLLM's, on top of `OPTIONS`.
    """

    #: Forks engines for whom that makes no difference; None: all of them get interpreters of their own.
    zygote: ClassVar[Zygote | None] = None

    def __init__(
        self,
        model: Path,
        log: Path,
        environment: dict[str, str] | None = None,
        *,
        fresh: bool = False,
        **options: Any,
    ) -> None:
        self._may_fork = not fresh
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        super().__init__(_MAIN, log, environment={**VARIABLES, **port, **(environment or {})})
        self._is_ready = False
        self.send("start", options={**OPTIONS, "model": str(model), **options})

    def _start(self, start: Start) -> ChildProcess:
        if self.zygote is not None and self._may_fork and self.zygote.suits(start.environment):
            return self.zygote.fork(start)
        return super()._start(start)

    def wait_ready(self) -> EngineProcess:
        """Wait until the engine has started.

        Raises:
            ChildError: it raised while starting.
            ChildEnded: the process ended.
        """
        if not self._is_ready:
            self.reply(READY_TIMEOUT_S)
            self._is_ready = True
        return self

    def ask(self, do: str, timeout_s: float = COMMAND_TIMEOUT_S, **arguments: Any) -> Any:
        """Run one command, once the engine has started, and return its reply."""
        self.wait_ready()
        return super().ask(do, timeout_s, **arguments)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        transfer: list[Any] | None = None,
        first_id: int | None = None,
    ) -> list[Any]:
        """Greedy tokens, and `kv_transfer_params` where the engine returns them; see `Engine.do_generate`."""
        return list(self.ask("generate", prompts=prompts, max_tokens=max_tokens, transfer=transfer, first_id=first_id))
