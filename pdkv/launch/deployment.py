"""Deployments as a library: engines and a proxy that run while a ``with`` block runs.

::

    settings = PDSettings.build("models/smollm2", kv_bytes=256 * 2**20, dtype="float32")
    with PDDeployment(settings) as deployment:
        ask(deployment.proxy_url)
        print(deployment.status("prefill")["workers"][0]["final_blocks"])
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdkv import registry
from pdkv.errors import ConfigError, LaunchError
from pdkv.launch.command import STOCK_NIXL, Command, engine_command, proxy_command, side_channel_address
from pdkv.launch.machine import check_port, pick_free_ports, resolve, share_cpus, share_memory
from pdkv.launch.process import Report
from pdkv.launch.settings import ENGINE_READY_TIMEOUT_S, EngineSettings, PDSettings, engine_settings
from pdkv.launch.supervisor import Deployment, quiet, temporary_dir
from pdkv.locks import held_by
from pdkv.registry import ConnectorEntry


class PDDeployment(Deployment):
    """Prefill, decode and proxy on one machine; the engines start together, the proxy when both are ready.

    Kind ``pdkv`` or, for comparison, ``stock-pd`` (vLLM's own NixlConnector and its own cache).

    Raises:
        ConfigError: while it is built, where a setting does not fit this machine; nothing was started.
    """

    def __init__(
        self, settings: PDSettings, *, report: Report = quiet, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        log_dir = settings.log_dir or temporary_dir()
        _refuse_shared_ports(settings)
        prefill, decode = share_memory(share_cpus([resolve(settings.prefill), resolve(settings.decode)]))
        proxy_port = settings.proxy_port
        if proxy_port:
            check_port(settings.proxy_host, proxy_port)
        else:
            (proxy_port,) = pick_free_ports([settings.proxy_host])
        if not decode.side_channel_peers and decode.side_channel_peers_file is None:
            decode = replace(decode, side_channel_peers=(side_channel_address(prefill),))
        self.settings = replace(settings, prefill=prefill, decode=decode, proxy_port=proxy_port)
        self._status_dirs = _status_dirs(settings.status_dir or log_dir / "status", (prefill, decode))
        engines = [_checked_command(engine, self._status_dirs.get(engine.role)) for engine in (prefill, decode)]
        proxy = proxy_command(
            [engines[0].url],
            [engines[1].url],
            settings.proxy_host,
            proxy_port,
            ready_timeout_s=settings.ready_timeout_s,
            limits=settings.proxy_limits,
        )
        super().__init__(
            [engines, [proxy]],
            ready_timeout_s=settings.ready_timeout_s,
            log_dir=log_dir,
            own_log_dir=settings.log_dir is None,
            report=report,
            should_stop=should_stop,
        )

    @property
    def proxy_url(self) -> str:
        return self.url_of("proxy")

    @property
    def prefill_url(self) -> str:
        return self.url_of("prefill")

    @property
    def decode_url(self) -> str:
        return self.url_of("decode")

    def status(self, role: str) -> dict[str, Any]:
        """What the engine `role` says of itself now; see :func:`read_status`. Stock engines say nothing."""
        self._command(role)
        return read_status(self._status_dirs[role]) if role in self._status_dirs else read_status(None)


class EngineDeployment(Deployment):
    """One engine: the prefill or the decode side by itself, or a stock one that does both."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        ready_timeout_s: float = ENGINE_READY_TIMEOUT_S,
        log_dir: Path | None = None,
        status_dir: Path | None = None,
        report: Report = quiet,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        chosen_log_dir = log_dir or temporary_dir()
        self.settings = resolve(settings)
        self._status_dirs = _status_dirs(status_dir or chosen_log_dir / "status", (self.settings,))
        status = self._status_dirs.get(self.settings.role)
        super().__init__(
            [[_checked_command(self.settings, status)]],
            ready_timeout_s=ready_timeout_s,
            log_dir=chosen_log_dir,
            own_log_dir=log_dir is None,
            report=report,
            should_stop=should_stop,
        )

    @property
    def url(self) -> str:
        return self.url_of(self.settings.role)

    def status(self) -> dict[str, Any]:
        """What the engine says of itself now; see :func:`read_status`."""
        return read_status(self._status_dirs.get(self.settings.role))


class StockEngine(EngineDeployment):
    """One aggregated vLLM with nothing of pdkv in it: no connector, no worker class, no ``PDKV_*`` variable."""

    def __init__(
        self,
        model: Path | str,
        *,
        ready_timeout_s: float = ENGINE_READY_TIMEOUT_S,
        log_dir: Path | None = None,
        report: Report = quiet,
        should_stop: Callable[[], bool] = lambda: False,
        **engine: Any,
    ) -> None:
        settings = engine_settings(**{**engine, "model": model, "role": "aggregated", "kind": "stock"})
        super().__init__(
            settings, ready_timeout_s=ready_timeout_s, log_dir=log_dir, report=report, should_stop=should_stop
        )


def connector_of(engine: EngineSettings) -> ConnectorEntry | None:
    """The connector that an engine is to load. ConfigError where no installed distribution announces its name."""
    if engine.kind == "stock":
        return None
    return STOCK_NIXL if engine.kind == "stock-pd" else registry.find(engine.connector)


def _checked_command(engine: EngineSettings, status_dir: Path | None) -> Command:
    """The engine's command. ConfigError where it would refuse a setting a minute later, when its model is loaded."""
    connector = connector_of(engine)
    command = engine_command(engine, connector, status_dir)
    if connector is not None:
        connector.check_settings(engine.connector_config, command.environment(os.environ))
    return command


def read_status(folder: Path | None) -> dict[str, Any]:
    """``{"workers": [rank 0, rank 1, ...], "scheduler": {...} or None}`` from an engine's status files.

    The files are replaced as a whole by their writer, so a file that exists is complete.

    Raises:
        LaunchError: a file is there and cannot be read as such; no engine of pdkv wrote it.
    """
    if folder is None:
        return {"workers": [], "scheduler": None}
    ranks = {path: path.stem.removeprefix("worker-rank") for path in folder.glob("worker-rank*.json")}
    workers = sorted((path for path, rank in ranks.items() if rank.isdecimal()), key=lambda path: int(ranks[path]))
    scheduler = folder / "scheduler.json"
    return {
        "workers": [_read_status_file(path) for path in workers],
        "scheduler": _read_status_file(scheduler) if scheduler.exists() else None,
    }


def _read_status_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"{path} is no engine's status ({error}); remove it or name another.") from error
    if not isinstance(content, dict):
        raise LaunchError(f"{path} is no engine's status, but {type(content).__name__}; remove it or name another.")
    return content


def _status_dirs(root: Path, engines: Sequence[EngineSettings]) -> dict[str, Path]:
    folders = {engine.role: (root / engine.role).absolute() for engine in engines if engine.kind == "pdkv"}
    for folder in folders.values():
        if (pid := held_by(folder)) is not None:
            raise ConfigError(
                f"another engine (pid {pid}) writes its status to {folder}; end it, or give another --status-dir."
            )
    return folders


def _refuse_shared_ports(settings: PDSettings) -> None:
    engines = (settings.prefill, settings.decode)
    ports = [settings.proxy_port, *(e.port for e in engines), *(e.side_channel_port for e in engines)]
    given = [port for port in ports if port]
    for port in given:
        if given.count(port) > 1:
            raise ConfigError(
                f"port {port} is given to more than one server; give each its own, or 0 to have it picked."
            )
