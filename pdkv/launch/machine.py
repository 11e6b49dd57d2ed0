"""Checks and choices that depend on the machine: the model folder, free ports, the device, its CPUs."""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pdkv.errors import ConfigError
from pdkv.launch.settings import EngineSettings, is_wildcard
from pdkv.memory import open_driver
from pdkv.sockets import bind, describe_bind_failure

#: Of the host's or card's memory, what the engines of one deployment may use together; the rest is left to others.
SHARED_MEMORY = 0.8
UTILIZATION_VARIABLE = "PDKV_MEMORY_UTILIZATION"
# As vLLM reads VLLM_CPU_OMP_THREADS_BIND: one list for each rank, 4 digits being more CPUs than a machine has.
_CPU_LIST = r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*"
_CPU_LISTS = re.compile(rf"{_CPU_LIST}(\|{_CPU_LIST})*", re.ASCII)
NVIDIA_DEVICE_NODE = Path("/dev/nvidiactl")  # made by the driver for every process that may use a GPU

FIRST_PORT = 10_000  # below are those of well-known services
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

_picked: set[int] = set()


def check_model(model: Path) -> None:
    """Refuse a folder that vLLM could not load, in a sentence instead of vLLM's traceback a minute later."""
    if not model.is_dir():
        raise ConfigError(f"the model folder {model} does not exist; give --model a local folder with config.json.")
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"{model} holds no config.json, so it is no model in the Hugging Face format; give --model the folder "
            "that save_pretrained wrote."
        )


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Refuse a port that somebody listens on already.

    vLLM itself listens with ``SO_REUSEPORT``, so that a second one would start on the same port in silence and get
    half of the connections.
    """
    try:
        with bind(host, port):
            pass
    except OSError as error:
        raise ConfigError(describe_bind_failure(error, host, port, option)) from error


def pick_free_ports(hosts: Sequence[str]) -> tuple[int, ...]:
    """One free port for each host, none that this process was given before. They are free again on return.

    They are of those that the system gives to nobody by itself, for connections: an engine takes dozens of these before
    it listens, a minute later, and so do others. Where all of the system's ports are such, the system chooses.

    Raises:
        ConfigError: a host is no address of this machine.
    """
    with ExitStack() as held:
        ports: list[int] = []
        quiet = _quiet_ports()
        while len(ports) < len(hosts):
            host = hosts[len(ports)]
            wanted = quiet.pop() if quiet else 0
            try:
                port = held.enter_context(bind(host, wanted)).getsockname()[1]
            except OSError as error:
                if wanted and error.errno == errno.EADDRINUSE:
                    continue
                raise ConfigError(describe_bind_failure(error, host, 0)) from error
            if port not in _picked:  # given out earlier, and its server may not listen yet
                _picked.add(port)
                ports.append(port)
    return tuple(ports)


def _quiet_ports() -> list[int]:
    """Ports outside the range for connections (ip(7)), in an order of their own each time."""
    lowest, highest = map(int, EPHEMERAL_PORTS.read_text().split())
    ports = [*range(FIRST_PORT, lowest), *range(max(FIRST_PORT, highest + 1), 65_536)]
    random.shuffle(ports)
    return ports


def resolve_device(device: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` looks for the NVIDIA device node, which costs no import of torch."""
    if device != "auto":
        return device
    return "cuda" if NVIDIA_DEVICE_NODE.exists() else "cpu"


def reachable_host(host: str) -> str:
    """The address at which this machine reaches a server that listens on `host`."""
    if not is_wildcard(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def share_cpus(engines: Sequence[EngineSettings]) -> tuple[EngineSettings, ...]:
    """The engines with the CPUs of this machine shared out among those that run on the CPU and name none.

    vLLM's own choice (``auto``) gives every engine the same cores, and two engines then spin against each other.
    """
    allowed = sorted(os.sched_getaffinity(0))
    wanting = [e for e in engines if e.cpus is None and e.device == "cpu"]
    if len(wanting) < 2 or len(allowed) < len(wanting):
        return tuple(engines)
    share = len(allowed) // len(wanting)
    shares = {id(e): allowed[i * share : (i + 1) * share] for i, e in enumerate(wanting)}
    return tuple(replace(e, cpus=",".join(map(str, shares[id(e)]))) if id(e) in shares else e for e in engines)


def share_memory(engines: Sequence[EngineSettings]) -> tuple[EngineSettings, ...]:
    """Give each engine that was told nothing of memory its part of what they share: the host, or one card.

    An engine by itself takes what its machine has, so of two that start together one would find nothing left.
    """
    host = open_driver("host")
    part = int(host.memory_info().total * SHARED_MEMORY / len(engines))
    host.close()
    return tuple(_with_memory(engine, part, SHARED_MEMORY / len(engines)) for engine in engines)


def _with_memory(engine: EngineSettings, host_bytes: int, card_share: float) -> EngineSettings:
    told = engine.kv_bytes or engine.engine_memory or "--gpu-memory-utilization" in " ".join(engine.extra_args)
    if engine.kind != "pdkv" or told:
        return engine
    if engine.device == "cpu":
        return replace(engine, engine_memory=host_bytes)
    if {"CUDA_VISIBLE_DEVICES", UTILIZATION_VARIABLE} & set(engine.extra_env):
        return engine
    return replace(engine, extra_env={**engine.extra_env, UTILIZATION_VARIABLE: f"{card_share:g}"})


def resolve(engine: EngineSettings) -> EngineSettings:
    """The settings with every choice made: device, port, side-channel address and port. Checks model and ports.

    Raises:
        ConfigError: the model folder is wrong, a port is taken, or a CPU is not there.
    """
    check_model(engine.model)
    side_host = engine.side_channel_host or engine.host
    for host, port, option in (
        (engine.host, engine.port, "--port"),
        (side_host, engine.side_channel_port, "--side-channel-port"),
    ):
        if port:
            check_port(host, port, option)
    port, side_port = pick_free_ports([engine.host, side_host])
    resolved = replace(
        engine,
        model=engine.model.resolve(),
        device=resolve_device(engine.device),
        port=engine.port or port,
        side_channel_host=side_host,
        side_channel_port=engine.side_channel_port or side_port,
    )
    check_cpus(resolved)
    return resolved


def check_cpus(engine: EngineSettings) -> None:
    """Refuse a CPU list that vLLM cannot read, and CPUs that are not there, which it would take and bind nothing to."""
    if engine.device != "cpu" or engine.cpus in (None, "auto", "nobind"):
        return
    if not _CPU_LISTS.fullmatch(engine.cpus or ""):
        raise ConfigError(f"cpus {engine.cpus!r} is no list of CPUs; write one like 0-3 or 0,2, or nobind.")
    allowed = os.sched_getaffinity(0)
    for part in re.split("[,|]", engine.cpus or ""):
        first, _, last = part.partition("-")
        for cpu in (first, last or first):
            if int(cpu) not in allowed:
                named = ",".join(map(str, sorted(allowed)))
                raise ConfigError(f"cpus {engine.cpus!r} names CPU {cpu}; this process may use {named}.")
