"""Settings of a side channel."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pdkv.errors import ConfigError
from pdkv.transfer.sidechannel.addresses import Address, require_secured
from pdkv.transfer.sidechannel.keyfiles import KeyPair, read_key_pair
from pdkv.transfer.sidechannel.peers import PeerBook, PeerEntry, PeersFile, StaticPeers

ANY_LOOPBACK = Address("127.0.0.1", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a side channel, times in seconds.

    Attributes:
        inbox_messages, inbox_nbytes: received from one peer and not taken yet.
        outgoing_messages, outgoing_nbytes: to be sent, to all peers together.
        peer_messages: in ZeroMQ's queue of one peer, each way (its high-water mark).
        max_guests: peers that have connected to us.
        handshake_s: the most that a connection may take until it is open; then it is closed.
        keepalive_s: whole seconds; a connection whose other host answers nothing for three of these is closed.
        introduce_every_s: how often a peer that does not answer is introduced to again.
        refresh_every_s: how often the peer book is asked.
        warn_every_s: how often the same complaint is logged at most, and that a channel is insecure.
        start_s: the most that starting may take.
    """

    inbox_messages: int = 1024
    inbox_nbytes: int = 16 * 2**20
    outgoing_messages: int = 8192
    outgoing_nbytes: int = 64 * 2**20
    peer_messages: int = 1024
    max_guests: int = 4096
    handshake_s: float = 2.0
    keepalive_s: int = 2
    introduce_every_s: float = 1.0
    refresh_every_s: float = 1.0
    warn_every_s: float = 60.0
    start_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannelSettings:
    """What a side channel needs to know.

    Attributes:
        bind: where to listen; port 0 picks a free one. None: only connect to others.
        peers: whom to connect to and, with keys, who may connect.
        keys: CurveZMQ keys; None only on loopback addresses, or where `insecure`.
        insecure: let others reach it without keys; logged every minute.
    """

    bind: Address | None = ANY_LOOPBACK
    peers: PeerBook = field(default_factory=StaticPeers)
    keys: KeyPair | None = None
    insecure: bool = False
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def from_values(
        cls,
        *,
        bind: str | None = "127.0.0.1:0",
        peers: str = "",
        peers_file: str = "",
        key_file: str = "",
        insecure: bool = False,
    ) -> SideChannelSettings:
        """From what a command line or environment holds.

        Args:
            peers: addresses separated by commas, for peers without keys.
            peers_file, key_file: paths; see :class:`~pdkv.transfer.sidechannel.peers.PeersFile` and `pdkv.keys`.

        Raises:
            ConfigError: a value is not valid, or two do not go together.
        """
        addresses = [text.strip() for text in peers.split(",") if text.strip()]
        if addresses and peers_file:
            raise ConfigError("side channel peers were given both as a list and as a file; give one of them.")
        return cls(
            bind=Address.parse(bind) if bind else None,
            peers=PeersFile(peers_file) if peers_file else StaticPeers.at(addresses),
            keys=read_key_pair(Path(key_file)) if key_file else None,
            insecure=insecure,
        )

    def require_consistent(self) -> None:
        """Refuse what cannot work or is not safe, before a socket is opened.

        Raises:
            ConfigError: one sentence.
        """
        if self.bind is not None:
            require_secured(self.bind, has_keys=self.keys is not None, insecure=self.insecure)
        for entry in self.peers.entries():
            self.require_usable(entry)

    def require_usable(self, entry: PeerEntry) -> None:
        """Refuse a peer that cannot be connected to, or not safely.

        Raises:
            ConfigError: one sentence.
        """
        if entry.address is None:
            return
        require_secured(entry.address, has_keys=self.keys is not None, insecure=self.insecure)
        if self.keys is not None and entry.public_key is None:
            raise ConfigError(f"peer {entry.name} at {entry.address} has no public key; add it to the peers file.")
        if entry.address.port == 0:
            raise ConfigError(f"peer {entry.name} at {entry.address} has port 0; give the port that it published.")
