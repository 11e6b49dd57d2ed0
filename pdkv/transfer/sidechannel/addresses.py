"""Addresses of side channels: ``host:port``, ``[IPv6]:port``, and which of them need keys."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from pdkv.errors import ConfigError

MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """Where a side channel listens. `host` has no brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From ``host:port``, ``[IPv6]:port`` or either behind ``tcp://``.

        Raises:
            ConfigError: it is neither.
        """
        host, colon, port = text.removeprefix("tcp://").rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        well_formed = bool(colon and host) and port.isascii() and port.isdigit() and int(port) <= MAX_PORT
        if not well_formed or (":" in host) != bracketed or any(c in " /*;[]" for c in host) or not host.isascii():
            raise ConfigError(
                f"side channel address {text!r} was given; write host:port, or [address]:port for IPv6, with a port "
                f"of 0 to {MAX_PORT}."
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """As ZeroMQ writes it."""
        return f"tcp://{self}"

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. Of names only ``localhost`` is trusted to be."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def require_secured(address: Address, *, has_keys: bool, insecure: bool) -> None:
    """Refuse an address that others can reach, without keys.

    Raises:
        ConfigError: one sentence with both ways out.
    """
    if has_keys or insecure or address.is_loopback:
        return
    raise ConfigError(
        f"side channel address {address} can be reached from other machines and there is no key; make one with "
        "`python -m pdkv.keys make FILE`, use a loopback address, or accept the risk with --insecure-side-channel."
    )
