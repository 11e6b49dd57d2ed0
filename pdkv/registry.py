"""KV connectors and transports by name.

A connector is announced through the entry-point group ``pdkv.connectors``; each entry point loads one
:class:`ConnectorEntry`. Looking a name up imports no engine and no transport: the entry names the engine-side class,
and the engine imports it. A transport is announced through ``pdkv.transports``; each entry point is a class or function
without arguments that returns a :class:`pdkv.transfer.transport.Transport`; one that can compare what arrives with sums
takes a keyword argument ``verify``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import TYPE_CHECKING, Any

from pdkv.errors import ConfigError, ConnectorError, TransportError

if TYPE_CHECKING:
    from pdkv.transfer.transport import Transport

GROUP = "pdkv.connectors"
TRANSPORTS = "pdkv.transports"


@dataclass(frozen=True, slots=True)
class ConnectorEntry:
    """What the launcher needs to know of a connector.

    Attributes:
        name: the name on the command line, e.g. ``nixl-pull``.
        vllm_class: value for ``kv_connector`` in vLLM's ``--kv-transfer-config``.
        vllm_module_path: value for ``kv_connector_module_path``.
        summary: one line for ``--help``.
        check: ``module:function`` that refuses, by ConfigError, what an engine would refuse of its settings; called
            with vLLM's ``kv_connector_extra_config`` and the engine's environment before the engine is started, so it
            imports no engine. Empty: nothing is checked before.
    """

    name: str
    vllm_class: str
    vllm_module_path: str
    summary: str
    check: str = ""

    def check_settings(self, extra: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Call what `check` names.

        Raises:
            ConfigError: the engine would refuse a setting.
            ConnectorError: what `check` names is not there.
        """
        if not self.check:
            return
        try:
            check = EntryPoint(self.name, self.check, GROUP).load()
        except (ImportError, AttributeError) as error:
            raise ConnectorError(
                f"the connector {self.name!r} names {self.check!r} to check its settings, which cannot be loaded "
                f"({error}); correct it in the distribution that announces it."
            ) from error
        check(extra, environment)


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


def transport_names() -> tuple[str, ...]:
    """Names of all installed transports, sorted."""
    return tuple(sorted(point.name for point in entry_points(group=TRANSPORTS)))


def find_transport(name: str, *, verify: bool | None = None) -> Callable[[], Transport]:
    """What makes a transport of this name, or of the form ``module:function``.

    Args:
        verify: whether what arrives is compared with its owner's sums; None leaves that to the transport.

    Raises:
        ConfigError: no installed distribution announces it, or it takes no ``verify``.
        TransportError: what it needs is not installed.
    """
    make = _find_transport(name)
    if verify is None:
        return make
    if "verify" not in signature(make).parameters:
        raise ConfigError(f"the transport {name!r} cannot be told whether to verify; leave it out, or use another one.")
    return partial(make, verify=verify)


def _find_transport(name: str) -> Callable[..., Transport]:
    if ":" in name:
        return _load_transport(EntryPoint(name, name, TRANSPORTS))
    points = {point.name: point for point in entry_points(group=TRANSPORTS)}
    if name not in points:
        known = ", ".join(sorted(points)) or "none (is pdkv installed, not just on PYTHONPATH?)"
        raise ConfigError(f"no transport is called {name!r}; installed are: {known}.")
    return _load_transport(points[name])


def _load_transport(point: EntryPoint) -> Callable[..., Transport]:
    try:
        make: Callable[..., Transport] = point.load()
    except ImportError as error:
        raise TransportError(f"the transport {point.name!r} needs something that is not installed: {error}.") from error
    except AttributeError as error:
        raise TransportError(f"the transport {point.name!r} is not there: {error}; correct its name.") from error
    return make
