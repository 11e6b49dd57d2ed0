"""What an engine would refuse of its settings, found before it is started: the launcher asks. Imports no engine.

Each connector of the catalogue names one of these functions. They only call what the engine itself reads its settings
by, so that both refuse the same in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkv.kvcache.sizing_constants import SizingConstants
from pdkv_connectors.nixl.settings import NixlSettings
from pdkv_connectors.vllm.ends_settings import consumer_settings
from pdkv_connectors.vllm.session_settings import ConnectorSettings
from pdkv_connectors.vllm.settings import EngineSettings


def check_nixl(extra: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """The connectors ``nixl-pull`` and ``nixl-push``; see :attr:`pdkv.registry.ConnectorEntry.check`.

    Raises:
        ConfigError: in the words of the engine.
    """
    _check_engine(environment)
    consumer_settings(extra)


def check_session(extra: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """The connector ``pdkv``; see :attr:`pdkv.registry.ConnectorEntry.check`.

    Raises:
        ConfigError: in the words of the engine.
    """
    _check_engine(environment)
    NixlSettings.from_environment(environment)
    ConnectorSettings.read(extra, environment)


def _check_engine(environment: Mapping[str, str]) -> None:
    EngineSettings.from_environment(environment)
    SizingConstants.from_environment(environment)
