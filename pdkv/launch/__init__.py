"""Starting engines and the proxy: ``python -m pdkv.launch``, and the same as a library.

Folder::

    settings.py    what the launcher is told: frozen, validated when built
    sizes.py       "256MiB"
    machine.py     what depends on the machine: model folder, free ports, device, CPUs
    command.py     argv and environment of each process; how to start vLLM without the launcher
    guard.py       the process above an engine that leaves nothing of it behind
    process.py     one supervised process: start, readiness, log, end
    diagnosis.py   the line that matters in a dead engine's log
    supervisor.py  several processes that start, are watched and end together
    deployment.py  PDDeployment, EngineDeployment, StockEngine: context managers
    cli.py         options and TOML file to settings
    __main__.py    the program
"""

from __future__ import annotations

from pdkv.launch.deployment import EngineDeployment, PDDeployment, StockEngine, read_status
from pdkv.launch.settings import EngineSettings, PDSettings, engine_settings
from pdkv.launch.sizes import parse_nbytes
from pdkv.launch.supervisor import Deployment

__all__ = [
    "Deployment",
    "EngineDeployment",
    "EngineSettings",
    "PDDeployment",
    "PDSettings",
    "StockEngine",
    "engine_settings",
    "parse_nbytes",
    "read_status",
]
