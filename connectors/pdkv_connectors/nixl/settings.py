"""How the nixl transport is to behave, by arguments or by the environment.

=======================  ====================================================================================
``PDKV_PROBE``           0: nothing is probed; 1 (default): the first device memory that a process registers
``PDKV_MIN_PROBE_GBPS``  GB/s below which the probe finds fault (default: 5 for device memory, 0 for the host's)
``PDKV_SLOW_PROBE``      what it does then: ``warn`` (default) or ``fail``
=======================  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from pdkv.arguments import NOT_NEGATIVE
from pdkv.errors import ConfigError

Probe = Literal["never", "device", "always"]
OnSlow = Literal["warn", "fail"]

#: Below this a READ within one host is emulated: over tcp 0.2 to 0.5 GB/s were measured, mapped 84 and more.
SLOW_DEVICE_GBPS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlSettings:
    """Settings of :class:`pdkv_connectors.nixl.transport.NixlTransport`.

    Attributes:
        probe: after which registrations a second process reads from every extent, compares and measures: none, the
            first of device memory in this process, or all.
        min_probe_gbps: bandwidth in GB/s below which the probe finds fault; None: 5 for device memory, any for the
            host's.
        on_slow: what that does: a warning and a count, or a TransportError from `register`.
        probe_timeout_s: the most that the probe may take.
        variables: UCX's settings, where the environment does not have them.
    """

    probe: Probe = "device"
    min_probe_gbps: float | None = None
    on_slow: OnSlow = "warn"
    probe_timeout_s: float = 60.0
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> NixlSettings:
        """From the variables of this module's docstring.

        Raises:
            ConfigError: one of them has a value that it cannot have.
        """
        probe, on_slow = environment.get("PDKV_PROBE") or "1", environment.get("PDKV_SLOW_PROBE") or "warn"
        if probe not in ("0", "1"):
            raise ConfigError(f"PDKV_PROBE must be 0 or 1, found {probe!r}; correct it or unset it.")
        if on_slow not in get_args(OnSlow):
            raise ConfigError(f"PDKV_SLOW_PROBE must be warn or fail, found {on_slow!r}; correct it or unset it.")
        return cls(
            probe="device" if probe == "1" else "never",
            min_probe_gbps=NOT_NEGATIVE.of_variable(environment, "PDKV_MIN_PROBE_GBPS"),
            on_slow=cast(OnSlow, on_slow),
        )

    def least_gbps(self, memory: str) -> float:
        """What the probe wants of NIXL's kind of memory, "DRAM" or "VRAM"."""
        if self.min_probe_gbps is not None:
            return self.min_probe_gbps
        return SLOW_DEVICE_GBPS if memory == "VRAM" else 0.0
