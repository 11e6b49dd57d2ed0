"""ucxx, or ucx-py where only that is importable: one asyncio interface with two names.

ucx-py (`ucp`) was retired in favour of ucxx; its packages of 0.45 and later are stubs whose build needs a package that
indexes do not have. Who has an old one installed can go on with it.

Importing ucxx sets ``UCX_RNDV_THRESH=8192`` and more in the environment of the process, for every library on UCX and
for child processes. With it NIXL's UCX ends a process whose peer dies while it is written to (SIGABRT in
`ucp_request.inl`). So these settings are kept for ucxx's own start.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pdkv.errors import TransportError
from pdkv_connectors.environment import environment, variables_kept_for_later

_own_variables: dict[str, str] = {}  # what ucxx wants to be set, from its import on
_READ_AT_IMPORT = ("UCX_MEMTYPE_CACHE",)  # by libucs as it is loaded; set later, it is warned of as unused


def find_ucx() -> Any:
    """The module.

    Raises:
        TransportError: neither is installed, or what is installed does not load.
    """
    problems = []
    for name in ("ucxx", "ucp"):
        try:
            with variables_kept_for_later("UCX_", _own_variables):
                return importlib.import_module(name)
        except Exception as error:  # a library that it needs may be missing or refuse to load, each in its own way
            problems.append(f"{name}: {type(error).__name__}: {error}")
    raise TransportError(f"the ucx transport needs ucxx; `pip install pdkv[ucx]` ({'; '.join(problems)}).")


def start_ucx(ucx: Any, options: Mapping[str, str]) -> None:
    """Initialise it for this process, such that waiting costs no CPU time. The environment's UCX_* come first."""
    if ucx.__name__ == "ucxx":
        how: dict[str, Any] = {"progress_mode": "thread", "enable_python_future": True}
    else:
        how = {"blocking_progress_mode": True}
    variables = {name: value for name, value in _own_variables.items() if name not in _READ_AT_IMPORT}
    with environment(variables):
        ucx.init(dict(options), env_takes_precedence=True, **how)


def describe_ucx(ucx: Any) -> dict[str, Any]:
    """What is used below: the package and UCX's own version and transports."""
    return {
        "package": f"{ucx.__name__} {getattr(ucx, '__version__', '?')}",
        "ucx_version": ".".join(str(part) for part in ucx.get_ucx_version()),
        "ucx_transports": sorted(getattr(ucx, "get_active_transports", set)()),
    }
