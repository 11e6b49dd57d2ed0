"""Command line and TOML file to settings.

A TOML file (``--config``) holds the options under their names with underscores::

    role = "pd"
    model = "models/smollm2"
    port = 8000                     # the proxy's, with role pd
    ready_timeout = 600

    [engine]                        # both engines
    kv_bytes = "256MiB"
    extra_args = ["--seed", "0"]

    [prefill]                       # one engine alone; wins over [engine]
    cpus = "0"

    [decode]
    cpus = "1"

An option on the command line wins over the file, for both engines.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdkv import registry
from pdkv.arguments import ArgumentParser
from pdkv.errors import ConfigError
from pdkv.launch.command import proxy_command
from pdkv.launch.deployment import EngineDeployment, PDDeployment
from pdkv.launch.machine import check_port, pick_free_ports
from pdkv.launch.process import Report
from pdkv.launch.settings import (
    DEVICES,
    ENGINE_READY_TIMEOUT_S,
    LOOPBACK,
    PROXY_READY_TIMEOUT_S,
    ROLES,
    PDSettings,
    ProxyLimits,
    engine_settings,
    require_choice,
    require_host,
    require_port,
    require_positive,
    require_text,
)
from pdkv.launch.supervisor import Deployment

# Options of the deployment and the roles they make sense with; all others belong to an engine.
_ROLE_OPTIONS = {
    "prefill_port": ("pd",),
    "decode_port": ("pd",),
    "prefill_url": ("proxy",),
    "decode_url": ("proxy",),
    "request_timeout": ("proxy", "pd"),
    "queue_timeout": ("proxy", "pd"),
    "max_requests": ("proxy", "pd"),
    "max_queued": ("proxy", "pd"),
    "status_dir": ("prefill", "decode", "pd"),
}
_TABLES = ("engine", "prefill", "decode")
_TOP = {"role", "model", "host", "port", "log_dir", "ready_timeout", *_ROLE_OPTIONS}


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for, before its values are checked.

    Attributes:
        top: options of the deployment.
        engines: options of the engine of each role, ``prefill`` and ``decode``.
        dry_run: print the commands, start nothing.
    """

    top: dict[str, Any]
    engines: dict[str, dict[str, Any]]
    dry_run: bool


def parser() -> ArgumentParser:
    """The options. None has a default here: what is not given is left to the file, then to the settings."""
    p = ArgumentParser(
        prog="python -m pdkv.launch",
        description="Start a prefill engine, a decode engine, the proxy, or all three (role pd) and watch over them.",
        epilog="Everything after -- goes to vLLM unchanged; with role pd to both engines. Engines also read variables "
        "called PDKV_…: python -m pydoc pdkv.launch.command lists them.",
        argument_default=argparse.SUPPRESS,
    )
    p.add_argument("--role", help=f"one of {', '.join(ROLES)}")
    p.add_argument("--model", help="local folder with config.json")
    p.add_argument("--config", help="TOML file with these options; see pdkv/launch/cli.py")
    p.add_argument("--dry-run", action="store_true", help="print the commands with their environment, start nothing")
    _add_server_options(p.add_argument_group("servers"))
    _add_cache_options(p.add_argument_group("engine and KV cache"))
    compare = p.add_argument_group("comparison with stock vLLM")
    compare.add_argument("--kind", help="pdkv (default) or stock-pd: vLLM's own cache and NixlConnector")
    return p


def _add_server_options(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--host", help=f"address to listen on (default {LOOPBACK}); with role pd the proxy's")
    g.add_argument("--port", type=int, help="port; 0 (default) picks a free one; with role pd the proxy's")
    g.add_argument("--prefill-port", type=int, help="role pd: the prefill engine's port")
    g.add_argument("--decode-port", type=int, help="role pd: the decode engine's port")
    g.add_argument("--side-channel-host", help="address at which peers reach the handshake (default: --host)")
    g.add_argument("--side-channel-port", type=int, help="its port; with role pd decode gets the next one")
    g.add_argument("--side-channel-peer", action="append", dest="side_channel_peers", metavar="HOST:PORT",
                   help="decode, connector pdkv: where prefill listens; may be given several times")  # fmt: skip
    g.add_argument("--side-channel-peers-file", metavar="FILE",
                   help="connector pdkv: keys, names and addresses of peers (python -m pdkv.keys allow)")  # fmt: skip
    g.add_argument("--side-channel-key-file", metavar="FILE",
                   help="connector pdkv: the engine's secret key (python -m pdkv.keys make)")  # fmt: skip
    g.add_argument("--insecure-side-channel", action="store_true",
                   help="connector pdkv: let other machines reach the side channel without keys")  # fmt: skip
    g.add_argument("--prefill-url", action="append", metavar="URL",
                   help="role proxy: base URL of a prefill engine; may be given several times")  # fmt: skip
    g.add_argument("--decode-url", action="append", metavar="URL",
                   help="role proxy: base URL of a decode engine; may be given several times")  # fmt: skip
    g.add_argument("--ready-timeout", type=float, metavar="S",
                   help=f"seconds until all must be ready (default {ENGINE_READY_TIMEOUT_S:g}; "
                        f"role proxy {PROXY_READY_TIMEOUT_S:g})")  # fmt: skip
    g.add_argument("--request-timeout", type=float, metavar="S", help="seconds the proxy gives each leg of a request")
    g.add_argument("--queue-timeout", type=float, metavar="S", help="seconds a request may wait for room on decode")
    g.add_argument("--max-requests", type=int, metavar="N", help="requests the proxy takes at once, beyond them 429")
    g.add_argument("--max-queued", type=int, metavar="N", help="of these, such that wait for room, beyond them 429")
    g.add_argument("--log-dir", help="folder for one log per process (default: a new one, removed after a clean end)")
    g.add_argument("--status-dir", help="folder for the engines' status files (default: in the log folder)")


def _add_cache_options(g: argparse._ArgumentGroup) -> None:
    connectors = ", ".join(registry.names()) or "none installed"
    g.add_argument("--connector", help=f"KV connector (default nixl-pull); installed: {connectors}")
    g.add_argument("--connector-config", type=_json_object, metavar="JSON", help="settings of the connector itself")
    g.add_argument("--device", help=f"one of {', '.join(DEVICES)} (default auto: cuda where there is a GPU)")
    g.add_argument("--kv-bytes", metavar="SIZE", help="budget of the final KV cache, e.g. 256MiB (default: measured)")
    g.add_argument(
        "--engine-memory",
        metavar="SIZE",
        help="bytes the engine may use in all, KV cache included (role pd shares 0.8 of the machine by default)",
    )
    g.add_argument("--capacity-blocks", type=int, help="blocks to reserve address space for")
    g.add_argument("--warmup-blocks", type=int, help="blocks to commit before warmup")
    g.add_argument("--granule", metavar="SIZE", help="smallest chunk, host memory only (default 2MiB)")
    g.add_argument("--block-size", type=int, help="tokens per block")
    g.add_argument("--max-model-len", type=int, help="tokens of the longest request, prompt and answer")
    g.add_argument("--admission-requests", type=int, metavar="N",
                   help="decode: requests that may wait for KV; more get 503 (default: max_num_seqs)")  # fmt: skip
    g.add_argument("--admission-blocks", type=int, metavar="N",
                   help="decode: blocks of their prompts (default: all)")  # fmt: skip
    g.add_argument("--dtype", help="as vLLM's, e.g. float32")
    g.add_argument(
        "--enable-sleep",
        action="store_true",
        help="serve /sleep and /wake_up (vLLM's development endpoints: do not let strangers reach the port)",
    )
    g.add_argument("--cpus", help="CPU list of the engine, e.g. 0-3 (role pd shares all out by default)")


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def parse(argv: Sequence[str]) -> Request:
    """Read the command line and the file it names.

    Raises:
        ConfigError: an option is unknown or does not go with the role, or the file cannot be read.
    """
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    given = vars(parser().parse_args(argv[:cut]))
    extra = tuple(argv[cut + 1 :])
    dry_run = given.pop("dry_run", False)
    file = read_file(Path(given.pop("config"))) if "config" in given else {}
    tables = {name: dict(file.pop(name, {})) for name in _TABLES}
    top = {**file, **{name: value for name, value in given.items() if name in _TOP}}
    from_line = {name: value for name, value in given.items() if name not in _TOP}
    if extra:
        from_line["extra_args"] = (*tables["engine"].get("extra_args", ()), *extra)
    _check_top(top)
    engines = {role: {**tables["engine"], **tables[role], **from_line} for role in ("prefill", "decode")}
    if top["role"] == "pd" and "side_channel_port" in from_line:
        engines["decode"]["side_channel_port"] += 1
    return Request(top, engines, dry_run)


def read_file(path: Path) -> dict[str, Any]:
    """A TOML file as :mod:`pdkv.launch.cli` describes it; ConfigError says where it is wrong."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}.") from error
    for name, value in content.items():
        if name not in _TOP and name not in _TABLES:
            raise ConfigError(f"{path}: {name!r} is unknown at the top; there are: {', '.join(sorted(_TOP))}, "
                              f"and the tables {', '.join(f'[{t}]' for t in _TABLES)}.")  # fmt: skip
        if (name in _TABLES) != isinstance(value, dict):
            raise ConfigError(f"{path}: {name!r} must {'' if name in _TABLES else 'not '}be a table.")
    for name in ("model", "log_dir", "status_dir"):
        require_text(name, content.get(name))
    for name in ("prefill_url", "decode_url"):
        if name in content and not isinstance(content[name], list):
            content[name] = [content[name]]
        for url in content.get(name, ()):
            require_text(name, url)
    if "model" in content and not Path(content["model"]).is_absolute():
        content["model"] = str(path.parent / content["model"])
    return content


def _check_top(top: dict[str, Any]) -> None:
    if "role" not in top:
        raise ConfigError(f"--role is missing; choose one of: {', '.join(ROLES)}.")
    require_choice("role", top["role"], ROLES)
    for name, roles in _ROLE_OPTIONS.items():
        if name in top and top["role"] not in roles:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} does not go with role {top['role']!r}; it is for role {' and '.join(roles)}.")
    if top["role"] == "proxy":
        for name in ("prefill_url", "decode_url"):
            if name not in top:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is missing; give the base URL, e.g. http://127.0.0.1:8100."
                )
    elif "model" not in top:
        raise ConfigError("--model is missing; give a local folder with config.json.")


def build(request: Request, report: Report, should_stop: Callable[[], bool]) -> Deployment:
    """The deployment that was asked for, not started.

    Raises:
        ConfigError: a setting is wrong or does not fit this machine.
    """
    role: str = request.top["role"]
    builders: dict[str, Callable[[Request, Report, Callable[[], bool]], Deployment]] = {
        "prefill": _build_engine,
        "decode": _build_engine,
        "proxy": _build_proxy,
        "pd": _build_pd,
    }
    return builders[role](request, report, should_stop)


def _build_engine(request: Request, report: Report, should_stop: Callable[[], bool]) -> Deployment:
    top = request.top
    engine = dict(request.engines[top["role"]])
    engine.update({name: top[name] for name in ("role", "model", "host", "port") if name in top})
    return EngineDeployment(
        engine_settings(**engine),
        ready_timeout_s=_timeout(top, ENGINE_READY_TIMEOUT_S),
        log_dir=_folder(top, "log_dir"),
        status_dir=_folder(top, "status_dir"),
        report=report,
        should_stop=should_stop,
    )


def _build_pd(request: Request, report: Report, should_stop: Callable[[], bool]) -> Deployment:
    top = request.top
    engines: dict[str, dict[str, Any]] = {
        role: values | {"port": top.get(f"{role}_port", values.get("port", 0))}
        for role, values in request.engines.items()
    }
    settings = PDSettings.build(
        top["model"],
        prefill=engines["prefill"],
        decode=engines["decode"],
        proxy_host=top.get("host", LOOPBACK),
        proxy_port=top.get("port", 0),
        ready_timeout_s=_timeout(top, ENGINE_READY_TIMEOUT_S),
        proxy_limits=_limits(top),
        log_dir=_folder(top, "log_dir"),
        status_dir=_folder(top, "status_dir"),
    )
    return PDDeployment(settings, report=report, should_stop=should_stop)


def _build_proxy(request: Request, report: Report, should_stop: Callable[[], bool]) -> Deployment:
    top = request.top
    host, port = top.get("host", LOOPBACK), top.get("port", 0)
    require_host("host", host)
    require_port("port", port)
    if port:
        check_port(host, port)
    timeout_s = _timeout(top, PROXY_READY_TIMEOUT_S)
    command = proxy_command(
        top["prefill_url"],
        top["decode_url"],
        host,
        port or pick_free_ports([host])[0],
        ready_timeout_s=timeout_s,
        limits=_limits(top),
    )
    # The proxy itself waits for its engines and says which one is missing; let it speak first.
    return Deployment(
        [[command]],
        ready_timeout_s=timeout_s + PROXY_READY_TIMEOUT_S,
        log_dir=_folder(top, "log_dir"),
        report=report,
        should_stop=should_stop,
    )


def _timeout(top: dict[str, Any], default_s: float) -> float:
    timeout_s: float = top.get("ready_timeout", default_s)
    require_positive("ready-timeout", timeout_s)
    return timeout_s


def _limits(top: dict[str, Any]) -> ProxyLimits:
    return ProxyLimits(
        request_timeout_s=top.get("request_timeout"),
        queue_timeout_s=top.get("queue_timeout"),
        max_requests=top.get("max_requests"),
        max_queued=top.get("max_queued"),
    )


def _folder(top: dict[str, Any], name: str) -> Path | None:
    return Path(top[name]) if name in top else None
