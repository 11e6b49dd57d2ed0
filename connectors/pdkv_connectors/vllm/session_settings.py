"""What `PdkvConnector` reads: ``kv_connector_extra_config`` first, then the environment, then the default.

==========================  ===============================  =====================================================
extra config                environment                      meaning
==========================  ===============================  =====================================================
``pdkv_transport``          ``PDKV_TRANSPORT``               ``auto`` (default) or the name of a transport
``pdkv_verify``             ``PDKV_VERIFY``                  1: over every transport what arrives is compared with
                                                             prefill's sums; 0: over none; both sides alike. Default:
                                                             over ipc
``pdkv_side_channel``       ``PDKV_SIDE_CHANNEL``            where to listen, ``host:port`` (default 127.0.0.1:0)
``pdkv_side_channel_peers`` ``PDKV_SIDE_CHANNEL_PEERS``      decode: where prefill engines listen, by commas
``pdkv_peers_file``         ``PDKV_PEERS_FILE``              the same with keys, see `pdkv.keys`
``pdkv_key_file``           ``PDKV_KEY_FILE``                the own secret key
``pdkv_insecure``           ``PDKV_INSECURE_SIDE_CHANNEL``   1: listen beyond this machine without keys
``pdkv_wait_s``             -                                decode: the longest wait for blocks
``pdkv_transfer_s``         -                                and then for the KV
``pdkv_silence_s``          -                                how long prefill may not answer
``pdkv_hold_s``             -                                how long a loaded request keeps its lease, in case it is
                                                             preempted (default 0)
``pdkv_rebuild_after_s``    -                                age of a transfer given up, at which the agent is rebuilt
``pdkv_max_waiting``        -                                requests that may wait for KV
==========================  ===============================  =====================================================

With several data-parallel ranks each listens on a port of its own: the one given plus its rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdkv.errors import ConfigError
from pdkv.registry import transport_names
from pdkv.transfer import ConsumerSettings, QuarantineSettings, SessionSettings
from pdkv.transfer.sidechannel import SideChannelSettings
from pdkv_connectors.vllm.settings import require_known

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Name, key, environment variable, default.
_TEXTS = (
    ("transport", "pdkv_transport", "PDKV_TRANSPORT", "auto"),
    ("verify", "pdkv_verify", "PDKV_VERIFY", ""),
    ("bind", "pdkv_side_channel", "PDKV_SIDE_CHANNEL", "127.0.0.1:0"),
    ("peers", "pdkv_side_channel_peers", "PDKV_SIDE_CHANNEL_PEERS", ""),
    ("peers_file", "pdkv_peers_file", "PDKV_PEERS_FILE", ""),
    ("key_file", "pdkv_key_file", "PDKV_KEY_FILE", ""),
    ("insecure", "pdkv_insecure", "PDKV_INSECURE_SIDE_CHANNEL", "0"),
)
_TIMES = ("wait_s", "transfer_s", "silence_s", "hold_s")
_KNOWN = frozenset(
    (
        *(key for _, key, _, _ in _TEXTS),
        *(f"pdkv_{name}" for name in _TIMES),
        "pdkv_rebuild_after_s",
        "pdkv_max_waiting",
    )
)
_LONGEST_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """See the module's docstring. `verify`: None leaves it to the transport."""

    transport: str
    verify: bool | None
    side_channel: SideChannelSettings
    session: SessionSettings

    @classmethod
    def of(cls, vllm_config: VllmConfig, environment: Mapping[str, str] = os.environ) -> ConnectorSettings:
        """Those of a rank of an engine; raises as :meth:`read` does."""
        transfer = vllm_config.kv_transfer_config
        return cls.read(
            transfer.kv_connector_extra_config or {},
            environment,
            on_failure=transfer.kv_load_failure_policy,
            rank=vllm_config.parallel_config.data_parallel_index,
        )

    @classmethod
    def read(
        cls, extra: Mapping[str, Any], environment: Mapping[str, str], *, on_failure: Any = "fail", rank: int = 0
    ) -> ConnectorSettings:
        """Read and check everything.

        Args:
            extra: ``kv_connector_extra_config``.
            on_failure: ``kv_load_failure_policy``.
            rank: data-parallel.

        Raises:
            ConfigError: a value is not valid, two contradict each other, or a setting is not known.
        """
        require_known(extra, _KNOWN)
        given = {
            name: str(extra.get(key, environment.get(variable, default))) for name, key, variable, default in _TEXTS
        }
        side_channel = SideChannelSettings.from_values(
            bind=given["bind"],
            peers=given["peers"],
            peers_file=given["peers_file"],
            key_file=given["key_file"],
            insecure=_switch("pdkv_insecure", given["insecure"]),
        )
        side_channel = _of_rank(side_channel, rank)
        side_channel.require_consistent()
        verify = _switch("pdkv_verify", given["verify"]) if given["verify"] else None
        session = _session(extra, on_failure)
        return cls(_transport(given["transport"]), verify, side_channel, session)


def _transport(name: str) -> str:
    if ":" not in name and name not in transport_names():
        raise ConfigError(f"there is no transport {name!r}; choose one of {', '.join(transport_names())}.")
    return name


def _session(extra: Mapping[str, Any], on_failure: Any) -> SessionSettings:
    times = {name: _number(f"pdkv_{name}", extra[f"pdkv_{name}"]) for name in _TIMES if f"pdkv_{name}" in extra}
    rebuild = extra.get("pdkv_rebuild_after_s", QuarantineSettings().rebuild_after_s)
    decode = ConsumerSettings(
        on_failure=on_failure,
        quarantine=QuarantineSettings(rebuild_after_s=_number("pdkv_rebuild_after_s", rebuild)),
        **times,  # type: ignore[arg-type]
    )
    waiting = _number("pdkv_max_waiting", extra.get("pdkv_max_waiting", SessionSettings().max_waiting))
    return SessionSettings(decode=decode, max_waiting=max(1, int(waiting)))


def _of_rank(settings: SideChannelSettings, rank: int) -> SideChannelSettings:
    if settings.bind is None or settings.bind.port == 0:
        return settings
    return replace(settings, bind=replace(settings.bind, port=settings.bind.port + rank))


def _switch(key: str, text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true"):
        raise ConfigError(f"{key} must be 0 or 1, found {text!r}; correct it.")
    return text.lower() in ("1", "true")


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_S:
        raise ConfigError(f"{key} must be a number from 0 to {_LONGEST_S:.0f}, found {value!r}; correct it.")
    return float(value)
