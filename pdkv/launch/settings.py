"""What the launcher is told: frozen, validated when built, and knowing nothing of vLLM's flags.

Values are checked here; what depends on the machine (the model folder, free ports, the device) is in
:mod:`pdkv.launch.machine`.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pdkv.errors import CapacityError, ConfigError
from pdkv.launch.sizes import parse_nbytes

ENGINE_ROLES = ("prefill", "decode", "aggregated")
ROLES = ("prefill", "decode", "proxy", "pd")
# pdkv: growable cache and pdkv's connector. stock-pd: vLLM's own NixlConnector. stock: one engine, no connector.
KINDS = ("pdkv", "stock-pd", "stock")
DEVICES = ("auto", "cpu", "cuda")

SIZES = ("kv_bytes", "engine_memory", "granule")
COUNTS = (
    "capacity_blocks",
    "warmup_blocks",
    "block_size",
    "max_model_len",
    "admission_requests",
    "admission_blocks",
)
POSITIVE = (*SIZES, *COUNTS)

# Importing vLLM in three processes takes 30 to 110 s on two busy cores; loading a large model comes on top.
ENGINE_READY_TIMEOUT_S = 600.0
# The engines are expected to run when a proxy is started by itself, so a wrong URL shows soon.
PROXY_READY_TIMEOUT_S = 30.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One vLLM engine.

    Attributes:
        model: a local folder with ``config.json``.
        role: ``prefill``, ``decode``, or ``aggregated`` (one engine that does both; kind ``stock`` only).
        kind: ``pdkv``, ``stock-pd`` or ``stock``; the stock kinds are for comparison.
        connector: a name in the entry-point group ``pdkv.connectors``; read for kind ``pdkv`` only.
        host, port: where the HTTP server listens; port 0 has a free one picked.
        side_channel_host: address that peers reach the connector's handshake at; None means `host`.
        side_channel_port: 0 has a free one picked.
        side_channel_peers: ``host:port`` of each prefill engine's side channel, for decode with connector ``pdkv``; a
            deployment of both fills it in.
        side_channel_key_file, side_channel_peers_file: connector ``pdkv``: the engine's secret key, and the keys and
            addresses of its peers (`pdkv.keys`).
        insecure_side_channel: connector ``pdkv``: listen where other machines reach it, without keys.
        device: ``auto`` is ``cuda`` where an NVIDIA device node exists, else ``cpu``.
        kv_bytes: budget of the final KV cache in bytes; None sizes it by what is free after warmup.
        engine_memory: bytes that the engine may use in all, KV cache included; None is vLLM's share of the device, and
            in a deployment its part of 0.8 of the machine (:func:`pdkv.launch.machine.share_memory`).
        capacity_blocks: blocks to reserve address space for; None leaves it to the engine.
        warmup_blocks: blocks to commit before warmup; None leaves it to the engine.
        granule: bytes, a power of two of at least one memory page; host memory only.
        admission_requests, admission_blocks: decode lets so many requests wait for KV from prefill, and so many blocks
            of their prompts, and answers 503 beyond; None is as many as run at once, and all blocks.
        connector_config: settings of the connector itself, vLLM's ``kv_connector_extra_config``.
        enable_sleep: let the engine be put to sleep over HTTP, by vLLM's ``/sleep`` and ``/wake_up``; vLLM serves them
            only beside its other development endpoints, so keep the port to yourself. Kind ``pdkv`` only.
        cpus: CPU list for OpenMP as vLLM's ``VLLM_CPU_OMP_THREADS_BIND`` takes it (``"0"``, ``"0-3"``, ``"nobind"``).
        extra_args: passed to vLLM unchanged, after all others.
        extra_env: set in the engine's environment, over all others.

    Raises:
        ConfigError: a value is not allowed; the message names it and what is.
        CapacityError: a count or a size is not positive.
    """

    model: Path
    role: str
    kind: str = "pdkv"
    connector: str = "nixl-pull"
    host: str = LOOPBACK
    port: int = 0
    side_channel_host: str | None = None
    side_channel_port: int = 0
    side_channel_peers: tuple[str, ...] = ()
    side_channel_key_file: str | None = None
    side_channel_peers_file: str | None = None
    insecure_side_channel: bool = False
    device: str = "auto"
    kv_bytes: int | None = None
    engine_memory: int | None = None
    capacity_blocks: int | None = None
    warmup_blocks: int | None = None
    granule: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    admission_requests: int | None = None
    admission_blocks: int | None = None
    dtype: str | None = None
    connector_config: Mapping[str, Any] = field(default_factory=dict)
    enable_sleep: bool = False
    cpus: str | None = None
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("role", self.role, ENGINE_ROLES)
        require_choice("kind", self.kind, KINDS)
        require_choice("device", self.device, DEVICES)
        if (self.kind == "stock") != (self.role == "aggregated"):
            raise ConfigError(
                f"kind {self.kind!r} does not go with role {self.role!r}; kind 'stock' runs one engine of role "
                "'aggregated', the other kinds run 'prefill' and 'decode'."
            )
        for name in POSITIVE:
            require_positive(name, getattr(self, name), whole=True)
        for name in ("connector", "dtype", "cpus", "side_channel_key_file", "side_channel_peers_file"):
            require_text(name, getattr(self, name))
        _require_texts("extra_args", self.extra_args)
        if not isinstance(self.connector_config, Mapping):
            raise ConfigError(f"connector_config {self.connector_config!r} is no table of the connector's settings.")
        _require_texts("side_channel_peers", self.side_channel_peers)
        if not isinstance(self.extra_env, Mapping):
            raise ConfigError(f"extra_env {self.extra_env!r} is no table of variables and their values.")
        _require_texts("extra_env", tuple(self.extra_env.values()))
        require_host("host", self.host)
        require_port("port", self.port)
        require_port("side-channel-port", self.side_channel_port)
        if not isinstance(self.enable_sleep, bool) or (self.enable_sleep and self.kind != "pdkv"):
            raise ConfigError(
                f"enable-sleep {self.enable_sleep!r} does not go with kind {self.kind!r}; it is true or false, and for "
                "kind 'pdkv'."
            )
        if not isinstance(self.insecure_side_channel, bool):
            raise ConfigError(f"insecure-side-channel {self.insecure_side_channel!r} is neither true nor false.")
        self._check_sizes()
        if self.side_channel_host is None and self.role != "aggregated" and is_wildcard(self.host):
            raise ConfigError(
                f"host {self.host} is no address that a peer can connect to; give --side-channel-host with the one "
                "that peers reach this machine at."
            )

    def _check_sizes(self) -> None:
        if self.granule is not None and (self.granule < 4096 or self.granule & (self.granule - 1)):
            raise ConfigError(f"granule {self.granule} is not a power of two of at least 4096 bytes, e.g. 2MiB.")
        capacity, warmup = self.capacity_blocks, self.warmup_blocks
        if capacity is not None and warmup is not None and warmup > capacity:
            raise CapacityError(
                f"warmup-blocks {warmup} is more than capacity-blocks {capacity}; lower the first or raise the second."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """What the proxy takes at once, and how long a request may take; None leaves each to the proxy's own default.

    Attributes:
        request_timeout_s: seconds that one leg of a request may take.
        queue_timeout_s: seconds that a request may wait for room on decode.
        max_requests, max_queued: requests under way, and of these such that wait for room.
    """

    request_timeout_s: float | None = None
    queue_timeout_s: float | None = None
    max_requests: int | None = None
    max_queued: int | None = None

    def __post_init__(self) -> None:
        for option, value in self._options():
            require_positive(option, value, whole=option.startswith("max"))

    def arguments(self) -> tuple[str, ...]:
        """As ``python -m pdkv.proxy`` takes them."""
        given = [(option, value) for option, value in self._options() if value is not None]
        return tuple(text for option, value in given for text in (f"--{option}", f"{value:g}"))

    def _options(self) -> list[tuple[str, float | None]]:
        return [(f.name.removesuffix("_s").replace("_", "-"), getattr(self, f.name)) for f in fields(self)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PDSettings:
    """A prefill engine, a decode engine and the proxy in front of them, on one machine.

    Attributes:
        prefill, decode: the two engines; their `host` is loopback unless told otherwise.
        proxy_host, proxy_port: where clients connect; port 0 has a free one picked.
        ready_timeout_s: seconds until every process must answer ``/health``.
        proxy_limits: what the proxy takes at once, and how long a request may take.
        log_dir: folder for ``prefill.log`` and so on; None makes one and removes it after a clean end.
        status_dir: folder in which each engine gets one for its status files; None puts them beside the logs.
    """

    prefill: EngineSettings
    decode: EngineSettings
    proxy_host: str = LOOPBACK
    proxy_port: int = 0
    ready_timeout_s: float = ENGINE_READY_TIMEOUT_S
    proxy_limits: ProxyLimits = field(default_factory=ProxyLimits)
    log_dir: Path | None = None
    status_dir: Path | None = None

    def __post_init__(self) -> None:
        require_host("host", self.proxy_host)
        require_port("port", self.proxy_port)
        require_positive("ready-timeout", self.ready_timeout_s)
        if self.prefill.role != "prefill" or self.decode.role != "decode":
            raise ConfigError(
                f"the engines of a P/D deployment are 'prefill' and 'decode', not {self.prefill.role!r} and "
                f"{self.decode.role!r}."
            )
        if self.prefill.model != self.decode.model:
            raise ConfigError(
                f"prefill serves {self.prefill.model} and decode serves {self.decode.model}; KV of one model means "
                "nothing to another: give both the same."
            )

    @classmethod
    def build(
        cls,
        model: Path | str,
        *,
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
        **common: Any,
    ) -> PDSettings:
        """Settings from one flat set of names: those of :class:`EngineSettings` go to both engines, the rest stay here.

        Args:
            model: the folder both serve.
            prefill, decode: settings of one engine alone; they win over `common`.
        """
        deployment_names = {f.name for f in fields(cls)}
        own = {name: common.pop(name) for name in list(common) if name in deployment_names}
        return cls(
            prefill=engine_settings(**{"model": model, **common, **(prefill or {}), "role": "prefill"}),
            decode=engine_settings(**{"model": model, **common, **(decode or {}), "role": "decode"}),
            **own,
        )


def engine_settings(**values: Any) -> EngineSettings:
    """:class:`EngineSettings` from names that a user wrote.

    Raises:
        ConfigError: a name is unknown, or a value is not allowed.
    """
    known = [f.name for f in fields(EngineSettings)]
    for name in values:
        if name not in known:
            raise ConfigError(f"{name!r} is no setting of an engine; there are: {', '.join(known)}.")
    values = {name: parse_nbytes(v) if name in SIZES and v is not None else v for name, v in values.items()}
    require_text("model", str(values["model"]) if isinstance(values["model"], Path) else values["model"])
    values["model"] = Path(values["model"])
    for name, example in (("extra_args", '["--seed", "0"]'), ("side_channel_peers", '["10.0.0.7:5600"]')):
        given = values.get(name, ())
        if not isinstance(given, list | tuple):  # a text would pass for its letters
            raise ConfigError(f"{name} {given!r} is no list; write {example}.")
        values[name] = tuple(given)
    return EngineSettings(**values)


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is unknown; choose one of: {', '.join(choices)}.")


#: More than a file, an address or a count of blocks can be on any machine (2**63 - 1).
_LARGEST = 2**63 - 1


def require_positive(name: str, value: float | None, *, whole: bool = False) -> None:
    if value is None:
        return
    option = name.replace("_", "-")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{option} {value!r} is not a number.")
    if whole and not isinstance(value, int):
        raise ConfigError(f"{option} {value!r} is not a whole number.")
    if value > _LARGEST:
        raise CapacityError(f"{option} is {value}, which no machine has; the largest is {_LARGEST}.")
    if value <= 0:
        raise CapacityError(f"{option} is {value}; it must be at least 1.")


def require_text(name: str, value: str | None) -> None:
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise ConfigError(f'{name} {value!r} is no text or an empty one; write it in quotes, e.g. {name} = "0".')


def _require_texts(name: str, values: tuple[object, ...]) -> None:
    if not all(isinstance(value, str) and "\0" not in value for value in values):
        raise ConfigError(f"{name} {list(values)} are not all texts; write numbers in quotes.")


def require_port(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ConfigError(f"{name} {value!r} is no TCP port; give 1 to 65535, or 0 to have a free one picked.")


def require_host(name: str, value: str) -> None:
    if not isinstance(value, str) or not value or any(c.isspace() or c in "/@[]\0" for c in value):
        raise ConfigError(f"{name} {value!r} is no host name or address; the default is {LOOPBACK}.")


def is_wildcard(host: str) -> bool:
    """Whether `host` means "every address of this machine"."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
