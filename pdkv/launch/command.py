"""The command line and environment of each process. Pure functions: nothing is started, looked up or checked here.

A plain vLLM starts the same way without the launcher. For a prefill engine on the CPU::

    VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 \\
    PDKV_STATUS_DIR=/tmp/prefill-status \\
    python -m vllm.entrypoints.openai.api_server --model DIR --host 127.0.0.1 --port 8100 --enforce-eager \\
        --kv-cache-memory-bytes 268435456 \\
        --worker-cls pdkv_connectors.vllm.worker.GrowableCPUWorker \\
        --middleware pdkv_connectors.vllm.http_abort.AbortById \\
        --kv-transfer-config '{"kv_connector":"PdkvNixlPullConnector",
            "kv_connector_module_path":"pdkv_connectors.vllm.nixl","kv_role":"kv_producer","kv_buffer_device":"cpu"}'

A decode engine differs in its ports, in ``"kv_role":"kv_consumer"`` and in its middleware,
``pdkv_connectors.vllm.http.DecodeAdmission``; on CUDA the worker class is
``pdkv_connectors.vllm.worker.GrowableGPUWorker`` and ``kv_buffer_device`` is ``cuda``. Then
``python -m pdkv.proxy --prefill-url http://127.0.0.1:8100 --decode-url http://127.0.0.1:8200``.

``--kv-cache-memory-bytes`` is the final cache's budget; without it the cache is sized by what is free after warmup.
All that an engine, and what it loads, reads of ``PDKV_*`` is in this table. All are optional; the launcher sets what it
has options for, and passes the others on.

============================== ========================================================================================
``PDKV_CAPACITY_BLOCKS``       blocks to reserve address space for (default: all the device's memory)
``PDKV_WARMUP_BLOCKS``         blocks to commit before warmup (default: what a full batch of tokens needs)
``PDKV_ENGINE_MEMORY``         bytes that the engine may use in all: weights, activations and KV cache (default: the
                               memory utilization's share of the device)
``PDKV_MEMORY_UTILIZATION``    on CUDA, the share of the card that the engine may use; needed only to ask for vLLM's
                               default of ``--gpu-memory-utilization``, which counts as not given
``PDKV_SIZING_…``              the constants of sizing, one variable each: :mod:`pdkv.kvcache.sizing_constants`
``PDKV_GRANULE``               smallest chunk in bytes, host memory only (default: 2 MiB)
``PDKV_STATUS_DIR``            folder for the engine's status files (default: none are written)
``PDKV_SLEEP``                 1 lets an engine on a CPU sleep (on CUDA vLLM's ``--enable-sleep-mode`` does)
``PDKV_SLEEP_TIMEOUT``         seconds that a sleep waits for requests, leases and transfers, if it does (default: 30)
``PDKV_PROBE``                 0 skips the bandwidth probe at start-up on CUDA (default: 1)
``PDKV_MIN_PROBE_GBPS``        connector pdkv over nixl: GB/s below which the probe finds fault (default: 5 for device
                               memory, 0 for the host's)
``PDKV_SLOW_PROBE``            and what it does then, ``warn`` (default) or ``fail``
``PDKV_SIDE_CHANNEL``          connector pdkv: where to listen, ``host:port`` (default: 127.0.0.1, a free port)
``PDKV_SIDE_CHANNEL_PEERS``    connector pdkv, decode: where prefill engines listen, separated by commas
``PDKV_PEERS_FILE``            connector pdkv: keys and addresses of peers, in the place of the list; see `pdkv.keys`
``PDKV_KEY_FILE``              connector pdkv: the engine's secret key
``PDKV_INSECURE_SIDE_CHANNEL`` connector pdkv: 1 to listen where other machines reach it, without keys
``PDKV_TRANSPORT``             connector pdkv: ``auto`` (default) or the name of a transport
``PDKV_VERIFY``                connector pdkv: 1 to compare what arrives with prefill's sums, whatever moves it; 0: none
                               (default: where it moves over ipc)
``PDKV_ADMISSION_REQUESTS``    decode: requests that may wait for KV from prefill (default: ``max_num_seqs``)
``PDKV_ADMISSION_BLOCKS``      decode: blocks that their prompts may have together (default: all)
``PDKV_CORRUPT_RECEIVED_KV``   1 zeroes each block that decode has received, announced loudly in the log: a negative
                               control for correctness harnesses
============================== ========================================================================================

``python -m vllm...api_server`` and not ``vllm serve``: the CPU build is a distribution of another name, and the command
looks for the metadata of one called vllm.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError
from pdkv.kvcache import require_block_multiple
from pdkv.launch.machine import reachable_host
from pdkv.launch.settings import EngineSettings, ProxyLimits
from pdkv.registry import ConnectorEntry

API_SERVER = "vllm.entrypoints.openai.api_server"
WORKER_CLASSES = {
    "cpu": "pdkv_connectors.vllm.worker.GrowableCPUWorker",
    "cuda": "pdkv_connectors.vllm.worker.GrowableGPUWorker",
}
STOCK_NIXL = ConnectorEntry(
    name="stock", vllm_class="NixlConnector", vllm_module_path="", summary="vLLM's own NIXL connector"
)
#: What vLLM's attention backends take, in tokens: CPU_ATTN multiples of 32, those of CUDA multiples of 16. vLLM itself
#: would start all the same and split or round blocks where the peer does not.
_BLOCK_MULTIPLES = {"cpu": 32, "cuda": 16}
#: Answers /sleep with 409 where blocks are held, and requests for tokens with 503 while the engine is asleep.
SLEEP_MIDDLEWARE = "pdkv_connectors.vllm.sleep_http.SleepAnswers"
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_PDKV_VARIABLES = {
    "PDKV_CAPACITY_BLOCKS": "capacity_blocks",
    "PDKV_WARMUP_BLOCKS": "warmup_blocks",
    "PDKV_ENGINE_MEMORY": "engine_memory",
    "PDKV_GRANULE": "granule",
    "PDKV_ADMISSION_REQUESTS": "admission_requests",
    "PDKV_ADMISSION_BLOCKS": "admission_blocks",
    "PDKV_KEY_FILE": "side_channel_key_file",
    "PDKV_PEERS_FILE": "side_channel_peers_file",
}
#: vLLM's API server loads them: decode bounds who waits for KV, prefill lets the proxy give up a request by its id.
_MIDDLEWARES = {
    "decode": "pdkv_connectors.vllm.http.DecodeAdmission",
    "prefill": "pdkv_connectors.vllm.http_abort.AbortById",
}
# Flags whose value the launcher must know itself; given after "--" they would contradict it.
_OWN_FLAGS = {
    "--model": "--model",
    "--host": "--host",
    "--port": "--port",
    "--worker-cls": "--device",
    "--kv-transfer-config": "--connector",
    "--kv-cache-memory-bytes": "--kv-bytes",
    "--block-size": "--block-size",
    "--max-model-len": "--max-model-len",
    "--dtype": "--dtype",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start.

    Attributes:
        name: ``prefill``, ``decode``, ``aggregated`` or ``proxy``; names its log file.
        argv: the command line.
        env: variables set on top of the launcher's own environment.
        unset: variables that must not be inherited.
        url: base URL of its HTTP server, without a slash at the end; ``/health`` there tells when it is ready.
    """

    name: str
    argv: tuple[str, ...]
    url: str
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()

    def shell(self) -> str:
        """One line that a POSIX shell runs."""
        prefix = [part for name in self.unset for part in ("-u", name)]
        prefix += [f"{name}={value}" for name, value in sorted(self.env.items())]
        return shlex.join([*(["env", *prefix] if prefix else []), *self.argv])

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The complete environment of the process."""
        return {**{k: v for k, v in inherited.items() if k not in self.unset}, **self.env}


def http_url(host: str, port: int) -> str:
    """``http://host:port`` as this machine reaches it; IPv6 addresses get their brackets."""
    host = reachable_host(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def side_channel_address(engine: EngineSettings) -> str:
    """``host:port`` of an engine's side channel; IPv6 addresses get their brackets."""
    host = engine.side_channel_host or engine.host
    return f"[{host}]:{engine.side_channel_port}" if ":" in host else f"{host}:{engine.side_channel_port}"


def engine_command(engine: EngineSettings, connector: ConnectorEntry | None, status_dir: Path | None) -> Command:
    """The command of one engine.

    Args:
        engine: settings whose ports and device are chosen (:func:`pdkv.launch.machine.resolve`).
        connector: what ``--kv-transfer-config`` names; None for an aggregated engine.
        status_dir: folder for the engine's status files; None writes none. Stock engines write none.

    Raises:
        ConfigError: `extra_args` holds a flag that the launcher sets itself, or the device's attention kernels do not
            take blocks of that size.
    """
    _refuse_own_flags(engine.extra_args)
    if engine.block_size is not None:
        require_block_multiple(engine.block_size, _BLOCK_MULTIPLES[engine.device])
    argv = [sys.executable, "-m", API_SERVER, "--model", str(engine.model)]
    argv += ["--host", engine.host, "--port", str(engine.port)]
    if engine.device == "cpu":
        argv.append("--enforce-eager")  # compiling on the CPU needs a C++ compiler and minutes
    if engine.kind == "pdkv":
        argv += ["--worker-cls", WORKER_CLASSES[engine.device], "--middleware", _MIDDLEWARES[engine.role]]
    if engine.enable_sleep:
        argv += ["--middleware", SLEEP_MIDDLEWARE]
        if engine.device == "cuda":
            argv += ["--enable-sleep-mode", "--sleep-mode-backend", "pdkv"]
    for flag, value in (
        ("--kv-cache-memory-bytes", engine.kv_bytes),
        ("--block-size", engine.block_size),
        ("--max-model-len", engine.max_model_len),
        ("--dtype", engine.dtype),
    ):
        if value is not None:
            argv += [flag, str(value)]
    if connector is not None:
        argv += ["--kv-transfer-config", json.dumps(transfer_config(engine, connector), separators=(",", ":"))]
    env, unset = _engine_environment(engine, status_dir)
    env.update(engine.extra_env)
    return Command(engine.role, (*argv, *engine.extra_args), http_url(engine.host, engine.port), env, unset)


def transfer_config(engine: EngineSettings, connector: ConnectorEntry) -> dict[str, Any]:
    """vLLM's ``--kv-transfer-config``."""
    config: dict[str, Any] = {"kv_connector": connector.vllm_class}
    if connector.vllm_module_path:
        config["kv_connector_module_path"] = connector.vllm_module_path
    config["kv_role"] = _KV_ROLES[engine.role]
    config["kv_buffer_device"] = engine.device
    # vLLM's default, said aloud: a failed load must fail the request and never be recomputed in silence.
    config["kv_load_failure_policy"] = "fail"
    if engine.connector_config:
        config["kv_connector_extra_config"] = dict(engine.connector_config)
    return config


def proxy_command(
    prefill_urls: Sequence[str],
    decode_urls: Sequence[str],
    host: str,
    port: int,
    *,
    ready_timeout_s: float,
    limits: ProxyLimits | None = None,
) -> Command:
    """The command of the proxy; the same as starting ``python -m pdkv.proxy`` by hand."""
    argv = [sys.executable, "-m", "pdkv.proxy"]
    for option, urls in (("--prefill-url", prefill_urls), ("--decode-url", decode_urls)):
        argv += [text for url in urls for text in (option, url)]
    argv += ["--host", host, "--port", str(port), "--ready-timeout", f"{ready_timeout_s:g}"]
    argv += (limits or ProxyLimits()).arguments()
    return Command("proxy", tuple(argv), http_url(host, port))


def _engine_environment(engine: EngineSettings, status_dir: Path | None) -> tuple[dict[str, str], tuple[str, ...]]:
    env: dict[str, str] = {}
    unset: list[str] = []
    if engine.role != "aggregated":
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = engine.side_channel_host or engine.host
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(engine.side_channel_port)
    if engine.role != "aggregated" and engine.kind == "pdkv":
        env["PDKV_SIDE_CHANNEL"] = side_channel_address(engine)
        if engine.side_channel_peers:
            env["PDKV_SIDE_CHANNEL_PEERS"] = ",".join(engine.side_channel_peers)
        if engine.insecure_side_channel:
            env["PDKV_INSECURE_SIDE_CHANNEL"] = "1"
    if engine.device == "cpu" and engine.cpus is not None:
        env["VLLM_CPU_OMP_THREADS_BIND"] = engine.cpus
    if engine.kv_bytes is not None:
        unset.append("VLLM_CPU_KVCACHE_SPACE")  # whole GiB, and it would win over the budget given in bytes
    if engine.kind != "pdkv":
        return env, (*unset, *_PDKV_VARIABLES, "PDKV_STATUS_DIR")
    for variable, name in _PDKV_VARIABLES.items():
        if (value := getattr(engine, name)) is not None:
            env[variable] = str(value)
    if engine.enable_sleep:
        env["PDKV_SLEEP"] = "1"
        env["VLLM_SERVER_DEV_MODE"] = "1"  # without it vLLM has no /sleep
    if status_dir is not None:
        env["PDKV_STATUS_DIR"] = str(status_dir)
    return env, tuple(unset)


def _refuse_own_flags(extra_args: tuple[str, ...]) -> None:
    for argument in extra_args:
        flag = argument.split("=", 1)[0].replace("_", "-")
        if flag in _OWN_FLAGS:
            raise ConfigError(
                f"{flag} after '--' would contradict what the launcher passes to vLLM itself; use the launcher's own "
                f"option {_OWN_FLAGS[flag]} before '--'."
            )
