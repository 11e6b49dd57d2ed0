"""Who may talk to this engine, and where engines are found. Never taken from a request."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdkv.errors import ConfigError
from pdkv.transfer.sidechannel.addresses import Address
from pdkv.transfer.sidechannel.keyfiles import parse_key

logger = logging.getLogger(__name__)

MAX_PEERS = 4096


@dataclass(frozen=True, slots=True)
class PeerEntry:
    """One line of a peers file.

    Attributes:
        public_key: 32 bytes; None where the side channel has no keys.
        address: where it listens; None for peers that only connect to us.
    """

    name: str
    public_key: bytes | None = None
    address: Address | None = None


class PeerBook(Protocol):
    """Configuration or a registry. Asked about once a second by the side channel's own thread; must not wait."""

    def entries(self) -> Sequence[PeerEntry]:
        """All peers as of now."""


class StaticPeers:
    """Peers that do not change."""

    def __init__(self, entries: Sequence[PeerEntry] = ()) -> None:
        self._entries = tuple(entries)

    @classmethod
    def at(cls, addresses: Sequence[str]) -> StaticPeers:
        """Peers without keys.

        Raises:
            ConfigError: something is no address.
        """
        return cls([PeerEntry(text, None, Address.parse(text)) for text in addresses])

    def entries(self) -> Sequence[PeerEntry]:
        return self._entries


class PeersFile:
    """A text file of peers, read again when it changes: ``PUBLIC_KEY NAME [ADDRESS]``, or ``- NAME ADDRESS``.

    The keys in it are the allow-list. Empty lines and lines that begin with ``#`` say nothing. A change that cannot be
    read keeps the peers as they were, and is logged.

    Raises:
        ConfigError: at the first reading: there is no such file, or a line is not as above.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._seen = self._fingerprint()
        self._entries = read_peers(self.path)

    def entries(self) -> Sequence[PeerEntry]:
        seen = self._fingerprint()
        if seen == self._seen:
            return self._entries
        try:
            self._entries = read_peers(self.path)
        except ConfigError as error:
            logger.error("The peers stay as they were: %s", error)
            if seen and isinstance(error.__cause__, OSError):
                return self._entries  # it is there and could not be opened, for lack of a descriptor maybe: once more
        else:
            logger.info("Read %d peers from %s.", len(self._entries), self.path)
        self._seen = seen
        return self._entries

    def _fingerprint(self) -> tuple[int, ...]:
        try:
            found = os.stat(self.path)
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns


def read_peers(path: Path) -> tuple[PeerEntry, ...]:
    """The peers in a file; see :class:`PeersFile`."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the peers file {path}: {error}.") from error
    wanted = [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    if len(wanted) > MAX_PEERS:
        raise ConfigError(f"{path} names {len(wanted)} peers; {MAX_PEERS} are the most.")
    return tuple(_parse(path, number, words) for number, words in wanted)


def _parse(path: Path, number: int, words: list[str]) -> PeerEntry:
    if len(words) not in (2, 3):
        raise ConfigError(f"{path}:{number} has {len(words)} words; write PUBLIC_KEY NAME, or PUBLIC_KEY NAME ADDRESS.")
    try:
        key = None if words[0] == "-" else parse_key(words[0])
        return PeerEntry(words[1], key, Address.parse(words[2]) if len(words) == 3 else None)
    except ConfigError as error:
        raise ConfigError(f"{path}:{number}: {error}") from error
