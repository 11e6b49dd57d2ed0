"""How each transport is made, and which of them can be used here. UCX listens only where NIXL cannot be had."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pdkv.errors import ConnectorError, DriverError, TransportError
from pdkv.transfer.first_error import FirstError
from pdkv.transfer.messages import EngineRef
from pdkv.transfer.transport import Transport

if TYPE_CHECKING:
    from pdkv.kvcache import GrowableKVCache

logger = logging.getLogger(__name__)

#: The best first.
ORDER = ("ipc", "nixl", "ucx")

Maker = Callable[..., Transport]


def _ipc(**options: Any) -> Transport:
    from pdkv_connectors.ipc.transport import IpcTransport

    return IpcTransport(**options)


def _nixl(**options: Any) -> Transport:
    from pdkv_connectors.nixl.transport import NixlTransport

    return NixlTransport(**options)


def _ucx(**options: Any) -> Transport:
    from pdkv_connectors.ucx.transport import UcxTransport

    return UcxTransport(**options)


MAKERS: Mapping[str, Maker] = {"ipc": _ipc, "nixl": _nixl, "ucx": _ucx}


class Makers:
    """Makes each transport once, registers those that can be used, and notes why another is not.

    Args:
        makers: by name; one that is left out is not used.
        counts: where it is counted that one cannot be used.
        writes: leave out what cannot write.

    Attributes:
        unavailable: why a transport is not used here, by its name.
    """

    def __init__(self, makers: Mapping[str, Maker], counts: Counter[str], *, writes: bool) -> None:
        self.unavailable: dict[str, str] = {}
        self._makers = makers
        self._counts = counts
        self._writes = writes
        self._made: dict[str, Transport] = {}

    def register(
        self, cache: GrowableKVCache, engine: EngineRef, groups: Sequence[Sequence[str]] | None
    ) -> dict[str, Transport]:
        """Register a cache with what can be used, by name.

        Raises:
            TransportError: there is nothing.
        """
        registered: dict[str, Transport] = {}
        self.unavailable = {}
        try:
            for name in ORDER:
                if (transport := self._usable(name, registered)) is None:
                    continue
                try:
                    transport.register(cache, engine, groups=groups)
                except (ConnectorError, DriverError) as error:
                    self._is_unavailable(name, str(error))
                else:
                    registered[name] = transport
        except BaseException:
            for name, transport in registered.items():
                FirstError().attempt(f"unregister the {name} transport again", transport.unregister)
            raise
        if not registered:
            raise TransportError(f"no transport can be used here: {listed(self.unavailable)}.")
        return registered

    def close(self, timeout_s: float) -> None:
        """Close what was made; what could not be is tried again by the next call."""
        with FirstError() as errors:
            for name, transport in list(self._made.items()):
                if errors.attempt(f"close the {name} transport", partial(transport.close, timeout_s=timeout_s)):
                    del self._made[name]

    def _usable(self, name: str, registered: Mapping[str, Transport]) -> Transport | None:
        """The transport, made once; None, with the reason noted, where it is not to be used."""
        if name not in self._makers:
            return None
        if name == "ucx" and "nixl" in registered:
            self._is_unavailable(name, "nixl is used in its place", wanted=False)
            return None
        try:
            transport = self._made.get(name) or self._makers[name]()
        except (ConnectorError, DriverError, ImportError, OSError) as error:
            self._is_unavailable(name, str(error))
            return None
        self._made[name] = transport
        if self._writes and not transport.can_write:
            self._is_unavailable(name, "it cannot write", wanted=False)
            return None
        return transport

    def _is_unavailable(self, name: str, reason: str, *, wanted: bool = True) -> None:
        self.unavailable[name] = reason
        if wanted:
            self._counts[f"unavailable_{name}"] += 1
            logger.warning("The %s transport cannot be used here: %s", name, reason)


def listed(reasons: Mapping[str, str]) -> str:
    """Reasons by the transport's name, as a part of a sentence."""
    return "; ".join(f"{name}: {reason.rstrip('.')}" for name, reason in reasons.items() if reason)
