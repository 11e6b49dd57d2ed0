"""What an engine reads from its environment.

The launcher sets these variables; a plain vLLM start may set them too. All are optional; :mod:`pdkv.launch.command`
has the list of them with their defaults.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdkv.arguments import COUNT, SECONDS, SHARE
from pdkv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The ``PDKV_*`` environment, checked. Sizes in bytes; None means "not set"."""

    capacity_blocks: int | None = None
    warmup_blocks: int | None = None
    engine_memory: int | None = None
    memory_utilization: float | None = None
    granule: int | None = None
    status_dir: Path | None = None
    probe: bool = True
    admission_requests: int | None = None
    admission_blocks: int | None = None
    sleep: bool = False
    sleep_timeout_s: float = 30.0
    corrupt_received_kv: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> EngineSettings:
        """Read and check the variables.

        Raises:
            ConfigError: a number is not one that it may be, or a switch neither 0 nor 1.
        """
        status_dir = environment.get("PDKV_STATUS_DIR")
        return cls(
            capacity_blocks=_count(environment, "PDKV_CAPACITY_BLOCKS"),
            warmup_blocks=_count(environment, "PDKV_WARMUP_BLOCKS"),
            engine_memory=_count(environment, "PDKV_ENGINE_MEMORY"),
            memory_utilization=SHARE.of_variable(environment, "PDKV_MEMORY_UTILIZATION"),
            granule=_count(environment, "PDKV_GRANULE"),
            status_dir=Path(status_dir) if status_dir else None,
            probe=_switch(environment, "PDKV_PROBE", default=True),
            admission_requests=_count(environment, "PDKV_ADMISSION_REQUESTS"),
            admission_blocks=_count(environment, "PDKV_ADMISSION_BLOCKS"),
            sleep=_switch(environment, "PDKV_SLEEP", default=False),
            sleep_timeout_s=SECONDS.of_variable(environment, "PDKV_SLEEP_TIMEOUT") or 30.0,
            corrupt_received_kv=_switch(environment, "PDKV_CORRUPT_RECEIVED_KV", default=False),
        )


def sleeps(vllm_config: VllmConfig) -> bool:
    """Whether the engine was started to sleep: vLLM's ``--enable-sleep-mode``, or on a CPU ``PDKV_SLEEP=1``."""
    from vllm.platforms import current_platform

    asked_for = EngineSettings.from_environment().sleep and current_platform.is_cpu()
    return bool(asked_for or vllm_config.model_config.enable_sleep_mode)


def _switch(environment: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environment.get(name) or str(int(default))
    if text not in ("0", "1"):
        raise ConfigError(f"{name} must be 0 or 1, found {text!r}; correct it or unset it.")
    return text == "1"


def _count(environment: Mapping[str, str], name: str) -> int | None:
    value = COUNT.of_variable(environment, name)
    return None if value is None else int(value)


def require_known(extra: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a setting of pdkv's that nobody reads: one that is misspelt would have no effect, and say nothing.

    Args:
        extra: ``kv_connector_extra_config``; keys without ``pdkv_`` are vLLM's.

    Raises:
        ConfigError: names what is unknown, and what is known.
    """
    unknown = sorted(str(key) for key in extra if str(key).startswith("pdkv_") and key not in known)
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config has {', '.join(unknown)}, which this connector does not know; it knows "
            f"{', '.join(sorted(known))}."
        )
