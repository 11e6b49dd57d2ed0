"""The numbers that sizing cannot measure, in one place: their defaults, where those come from, and how to set them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pdkv.errors import ConfigError

if TYPE_CHECKING:
    import argparse

_log = logging.getLogger(__name__)

# Beyond any memory; times the bytes of a machine it is still far from what a float holds.
_LARGEST = 1e18

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SizingConstants:
    """Margins and defaults of sizing. Each is a field, an option ``--sizing-…`` and a variable ``PDKV_SIZING_…``.

    vLLM's growable cache (pull requests 47363 and 50779, unreleased) changed its constants from revision to revision:
    floor 150 MiB, 256 MiB, 1 GiB; fraction 0.2, 0.02, 0.75. The defaults here are the latest revision's, which alone
    comes with a measurement. `python -m pdkv.sizing sweep` finds the smallest that hold for a workload.

    Attributes:
        margin_floor_bytes: least memory left free beyond the transient peak. Source: vLLM 50779, latest revision
            (1 GiB); it covers small models, whose encoder and sampler transients exceed their measured peak.
        margin_fraction: memory left free beyond the transient peak, as a share of that peak. Source: as above (0.75);
            measured there on GB200: the first prefill of an 8B model needed over 25 % beyond its allocated peak,
            adversarial input up to 45 %.
        warmup_reserve_fraction: share of the headroom that warmup leaves uncommitted, for transients that profiling
            does not meet. Source: vLLM 50779 (0.1, the same in its last two revisions).
        non_torch_reserve_bytes: memory that torch's allocator may not grow into, for allocations outside torch (NCCL,
            UCX, cuBLAS workspaces, CUDA module loading). Source: pdkv's choice, 256 MiB; not fitted to a measurement.
        weight_update_factor: memory wanted for a weight update, as a multiple of the largest layer's bytes. Source:
            pdkv's choice, 2: the tensor as loaded and the tensor as converted are alive together.
        growable_utilization: share of the device's memory that counts as requested where the cache is growable and
            nothing was said. Source: 1.0, as vLLM 50779: what is left free is the measured margin.
        fixed_utilization: the same where the cache is fixed. Source: 0.92, `gpu_memory_utilization` in vLLM 0.33.
    """

    margin_floor_bytes: int = 1 * GIB
    margin_fraction: float = 0.75
    warmup_reserve_fraction: float = 0.1
    non_torch_reserve_bytes: int = 256 * MIB
    weight_update_factor: float = 2.0
    growable_utilization: float = 1.0
    fixed_utilization: float = 0.92

    ENVIRONMENT_PREFIX: ClassVar[str] = "PDKV_SIZING_"

    def __post_init__(self) -> None:
        for name in ("margin_floor_bytes", "margin_fraction", "non_torch_reserve_bytes", "weight_update_factor"):
            value = getattr(self, name)
            if not 0 <= value <= _LARGEST:
                raise ConfigError(f"{name} must be a finite number of at least 0 and at most {_LARGEST:g}, not {value}")
        if not 0 <= self.warmup_reserve_fraction < 1:
            raise ConfigError(f"warmup_reserve_fraction must be in [0, 1), not {self.warmup_reserve_fraction}")
        for name in ("growable_utilization", "fixed_utilization"):
            check_utilization(getattr(self, name), name)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> SizingConstants:
        """The defaults, changed by what ``PDKV_SIZING_MARGIN_FLOOR_BYTES`` and the like say.

        Raises:
            ConfigError: a value is no number or out of range, or a variable with the prefix names no constant.
        """
        environment = os.environ if environment is None else environment
        prefix = cls.ENVIRONMENT_PREFIX
        given = {key[len(prefix) :].lower(): text for key, text in environment.items() if key.startswith(prefix)}
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            wrong = ", ".join(prefix + name.upper() for name in unknown)
            right = ", ".join(prefix + name.upper() for name in known)
            raise ConfigError(f"{wrong} names no constant of sizing; there are {right}")
        return replace(cls(), **{name: cls._parse(name, text) for name, text in given.items()})

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one option ``--sizing-…`` per constant; what is not given stays as the environment or default says."""
        group = parser.add_argument_group("constants of sizing")
        for field in fields(cls):
            option = "--sizing-" + field.name.replace("_", "-")
            group.add_argument(option, metavar="N", default=None, help=f"default {field.default}")

    @classmethod
    def from_arguments(
        cls, arguments: argparse.Namespace, environment: Mapping[str, str] | None = None
    ) -> SizingConstants:
        """Command line before environment before defaults."""
        given = {field.name: getattr(arguments, "sizing_" + field.name, None) for field in fields(cls)}
        changes = {name: cls._parse(name, text) for name, text in given.items() if text is not None}
        return replace(cls.from_environment(environment), **changes)

    def as_environment(self) -> dict[str, str]:
        """The variables that make :meth:`from_environment` return these constants in a child process."""
        return {self.ENVIRONMENT_PREFIX + f.name.upper(): str(getattr(self, f.name)) for f in fields(self)}

    def describe(self) -> dict[str, int | float]:
        """Name to value, for status files and logs."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def log(self) -> None:
        """Write all constants to the log in one line, once at start."""
        _log.info("Sizing constants: %s", ", ".join(f"{name}={value}" for name, value in self.describe().items()))

    @classmethod
    def _parse(cls, name: str, text: str) -> Any:
        kind: type[int] | type[float] = int if name.endswith("_bytes") else float
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number of bytes" if kind is int else "a number"
            raise ConfigError(f"{name} of sizing must be {wanted}, not {text!r}") from None


def check_utilization(value: float, name: str = "memory utilization") -> float:
    """Return `value` if it is a share of a device's memory, in (0, 1]; raise ConfigError otherwise."""
    if not 0 < value <= 1:
        raise ConfigError(f"{name} must be above 0 and at most 1, not {value}")
    return value


__all__ = ["GIB", "MIB", "SizingConstants", "check_utilization"]
