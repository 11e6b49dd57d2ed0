"""What the NIXL connectors read from ``kv_connector_extra_config``, besides what vLLM's own reads. Imports no engine.

========================  =======================================================================
``pdkv_wait_s``           decode: the longest wait for blocks
``pdkv_transfer_s``       and then for the KV
``pdkv_silence_s``        how long prefill may not answer
``pdkv_rebuild_after_s``  age of a transfer given up, at which the agent is rebuilt
``pdkv_hold_s``           how long prefill keeps blocks that have arrived, in case their request is
                          preempted
``kv_lease_duration``     vLLM's own: how long prefill keeps blocks that nobody asks for (default 30)
========================  =======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkv.errors import ConfigError
from pdkv.transfer import ConsumerSettings, LeaseSettings, QuarantineSettings
from pdkv_connectors.vllm.settings import require_known

SETTINGS = ("pdkv_wait_s", "pdkv_transfer_s", "pdkv_silence_s", "pdkv_rebuild_after_s", "pdkv_hold_s")


def lease_settings(extra: Mapping[str, Any]) -> LeaseSettings:
    """From vLLM's own ``kv_lease_duration``, in the proportions that stock vLLM has: 30, 20 and 5 seconds."""
    duration_s = extra.get("kv_lease_duration", 30)
    if isinstance(duration_s, bool) or not isinstance(duration_s, int | float) or not 1 <= duration_s < 86_400:
        raise ConfigError(f"kv_lease_duration must be 1 to 86400 seconds, found {duration_s!r}; correct it.")
    every_s = duration_s / 6
    return LeaseSettings(
        duration_s=duration_s, extension_s=duration_s * 2 / 3, renew_every_s=every_s, retry_every_s=min(1.0, every_s)
    )


def consumer_settings(extra: Mapping[str, Any], *, mode: str = "pull", on_failure: Any = "fail") -> ConsumerSettings:
    """Decode's settings.

    Args:
        extra: ``kv_connector_extra_config``.
        mode: ``pull`` or ``push``.
        on_failure: ``kv_load_failure_policy``.

    Raises:
        ConfigError: a time is not a positive number, or a setting is not known.
    """
    require_known(extra, SETTINGS)
    times = {key: extra[key] for key in SETTINGS if key in extra}
    for key, value in times.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 86_400:
            raise ConfigError(f"{key} must be a number of seconds between 0 and a day, found {value!r}; correct it.")
    rebuild_after_s = times.pop("pdkv_rebuild_after_s", QuarantineSettings().rebuild_after_s)
    return ConsumerSettings(
        mode="pull" if mode == "pull" else "push",
        on_failure=on_failure,
        lease=lease_settings(extra),
        quarantine=QuarantineSettings(rebuild_after_s=rebuild_after_s),
        **{key.removeprefix("pdkv_"): float(value) for key, value in times.items()},
    )
