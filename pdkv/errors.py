"""Every exception that pdkv raises on purpose.

::

    PdkvError
    ├── ConfigError              a setting is wrong; change it and try again     (also a ValueError)
    │   ├── LayoutError          the KV cache layout cannot do what was asked
    │   └── CapacityError        a size or count is too small or too large
    ├── StateError               the call is not allowed in the present state    (also a RuntimeError)
    │   └── LeasesHeldError      requests hold blocks of the KV cache; carries `holders`
    ├── DriverError              the operating system or GPU driver refused a memory call
    │   ├── DriverUnavailableError   this driver cannot work on this machine
    │   └── OutOfMemoryError     not enough physical memory; carries `wanted` and `free`   (also a MemoryError)
    ├── ExtentError              a range is not one chunk of the committed prefix (I5, I6)
    ├── ConnectorError           a KV connector or its engine is not what pdkv needs
    │   ├── ProtocolError        a peer's message is malformed, too large, of another version, or not acceptable
    │   ├── SeamError            a private API of the engine is not where it is expected
    │   ├── StaleGenerationError a transfer names memory that has been replaced (I10)
    │   └── TransportError       a transport refused, or cannot do what was asked
    │       ├── GeometryError    two caches do not fit together
    │       └── TransferTimeoutError  a transfer or a peer took too long                 (also a TimeoutError)
    └── ProgramError             a program of pdkv cannot go on
        ├── LaunchError          an engine did not start, died, or missed its deadline
        └── HarnessError         a comparison could not be carried out

One class per thing a caller could do about it. Each message says what was wanted, what was found, and what to do.
"""

from __future__ import annotations


class PdkvError(Exception):
    """Root of all exceptions that pdkv raises on purpose."""


class ConfigError(PdkvError, ValueError):
    """A setting is wrong. Nothing was changed; correct it and call again."""


class LayoutError(ConfigError):
    """The KV cache layout cannot do what was asked. The message names a layout that can."""


class CapacityError(ConfigError):
    """A size or a count is too small or too large. The message says what would be enough."""


class StateError(PdkvError, RuntimeError):
    """The call is not allowed in the present state, which the message names."""


class LeasesHeldError(StateError):
    """Requests hold blocks of the KV cache, so that its memory cannot go. Wait for them, or end them.

    Attributes:
        holders: their ids.
    """

    def __init__(self, message: str, *, holders: tuple[str, ...]) -> None:
        super().__init__(message)
        self.holders = holders


class DriverError(PdkvError):
    """The operating system or the GPU driver refused a memory call."""


class DriverUnavailableError(DriverError):
    """This memory driver cannot work on this machine. The message says why."""


class OutOfMemoryError(DriverError, MemoryError):
    """Not enough physical memory.

    Attributes:
        wanted: bytes that were asked for, rounded to granules.
        free: bytes that were free when the request failed, as the driver counts them.
    """

    def __init__(self, message: str, *, wanted: int, free: int) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.free = free


class ExtentError(PdkvError):
    """A range that was to be registered or transferred is not within one chunk of the committed prefix."""


class ConnectorError(PdkvError):
    """A KV connector, or the engine around it, is not what pdkv needs."""


class ProtocolError(ConnectorError):
    """A peer sent what cannot be accepted. Only the request that it belongs to is affected."""


class SeamError(ConnectorError):
    """A private API of the engine is not where pdkv expects it, or did not fire exactly once."""


class StaleGenerationError(ConnectorError):
    """A transfer names a generation of the cache whose physical memory has been replaced since."""


class TransportError(ConnectorError):
    """A transport refused a registration, a peer or a transfer, or does not work on this machine."""


class GeometryError(TransportError):
    """The KV caches of two engines differ in what this transport cannot convert. The message names the difference."""


class TransferTimeoutError(TransportError, TimeoutError):
    """A transfer or a peer took too long. The transfer may still write: its destination belongs into quarantine."""


class ProgramError(PdkvError):
    """A program of pdkv cannot go on. Its message is what the user reads."""


class LaunchError(ProgramError):
    """An engine did not start, died, or missed its deadline."""


class HarnessError(ProgramError):
    """A comparison could not be carried out."""


__all__ = [
    "CapacityError",
    "ConfigError",
    "ConnectorError",
    "DriverError",
    "DriverUnavailableError",
    "ExtentError",
    "GeometryError",
    "HarnessError",
    "LaunchError",
    "LayoutError",
    "LeasesHeldError",
    "OutOfMemoryError",
    "PdkvError",
    "ProgramError",
    "ProtocolError",
    "SeamError",
    "StaleGenerationError",
    "StateError",
    "TransferTimeoutError",
    "TransportError",
]
