"""KV connectors by name.

A connector is announced through the entry-point group ``pdkv.connectors``; each entry point loads one
:class:`ConnectorEntry`. Looking a name up imports no engine and no transport: the entry names the engine-side class,
and the engine imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from pdkv.errors import ConfigError, ConnectorError

GROUP = "pdkv.connectors"


@dataclass(frozen=True, slots=True)
class ConnectorEntry:
    """What the launcher needs to know of a connector.

    Attributes:
        name: the name on the command line, e.g. ``nixl-pull``.
        vllm_class: value for ``kv_connector`` in vLLM's ``--kv-transfer-config``.
        vllm_module_path: value for ``kv_connector_module_path``.
        summary: one line for ``--help``.
    """

    name: str
    vllm_class: str
    vllm_module_path: str
    summary: str


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def names() -> tuple[str, ...]:
    """Names of all installed connectors, sorted."""
    return tuple(sorted(_entry_points()))


def find(name: str) -> ConnectorEntry:
    """The entry called `name`.

    Raises:
        ConfigError: no installed distribution announces it.
        ConnectorError: what it announces is not a :class:`ConnectorEntry`.
    """
    points = _entry_points()
    if name not in points:
        known = ", ".join(sorted(points)) or "none (is pdkv installed, not just on PYTHONPATH?)"
        raise ConfigError(f"no KV connector is called {name!r}; installed are: {known}.")
    entry = points[name].load()
    if not isinstance(entry, ConnectorEntry):
        raise ConnectorError(
            f"the entry point {name!r} in group {GROUP!r} loads {type(entry).__name__}, not ConnectorEntry; "
            f"correct it in the distribution that announces it ({points[name].value})."
        )
    return entry
