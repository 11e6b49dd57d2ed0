"""``python -m pdkv.keys make|show|allow``.

An engine gets a pair: ``make p.key`` writes the secret key to ``p.key`` (mode 0600) and the public one to
``p.key.pub``. The public key goes into the peers file of every engine that is to talk to it: ``allow``.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pdkv.arguments import ArgumentParser
from pdkv.errors import ConfigError, PdkvError, StateError
from pdkv.locks import FolderLock
from pdkv.transfer.sidechannel.addresses import Address
from pdkv.transfer.sidechannel.keyfiles import parse_key, read_key_pair, write_key_pair
from pdkv.transfer.sidechannel.peers import read_peers

_LOCK_TIMEOUT_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked; 0, or 2 and one sentence on stderr."""
    try:
        options = _parser().parse_args(arguments)
        if options.what == "make":
            keys = write_key_pair(options.file)
            print(f"{options.file}: secret key, keep it here\n{options.file}.pub: public key {keys.public.hex()}")
        elif options.what == "show":
            print(read_key_pair(options.file).public.hex())
        else:
            allow(options.peers_file, options.public_key, options.name, options.address)
    except PdkvError as error:
        print(f"pdkv.keys: error: {error}", file=sys.stderr)
        return 2
    return 0


def allow(peers_file: Path, public_key: str, name: str, address: str | None) -> None:
    """Add a peer to a peers file, which engines that use it read again by themselves.

    Args:
        public_key: 64 hex digits, or the path of a file that holds them.

    Raises:
        ConfigError: there is no key in it, the name or the key is in the file already, or it cannot be written, as
            what is no regular file.
    """
    key = parse_key(_read(public_key) if os.path.exists(public_key) else public_key)
    if not name or name.split() != [name]:
        raise ConfigError(f"the peer's name is {name!r}; give one word.")
    listens = Address.parse(address) if address else None
    if listens is not None and listens.port == 0:
        raise ConfigError(f"the peer's address is {address}; give the port that it published, 0 is none.")
    words = [key.hex(), name] + ([str(listens)] if listens is not None else [])
    target = Path(os.path.realpath(peers_file))  # of a link, what it names: the link stays
    if os.path.exists(target) and not os.path.isfile(target):
        raise ConfigError(f"{peers_file} is no regular file, and peers are not written to one; name another file.")
    with _alone(target):
        known = read_peers(target) if os.path.exists(target) else ()
        if any(entry.name == name or entry.public_key == key for entry in known):
            raise ConfigError(f"{peers_file} has a peer with this name or this key already; edit its line.")
        _append(target, " ".join(words))


@contextmanager
def _alone(peers_file: Path) -> Iterator[None]:
    """Whoever else adds a peer to the file waits, since each writes the whole file."""
    if not os.path.isdir(peers_file.parent):
        raise ConfigError(f"cannot write {peers_file}: there is no folder {peers_file.parent}; make it.")
    lock = FolderLock(peers_file.parent, f".{peers_file.name}.lock")
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            lock.take("writer of peers")
            break
        except StateError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"cannot write {peers_file}: {error}") from error
            time.sleep(0.02)
        except OSError as error:
            raise ConfigError(f"cannot write {peers_file}: {error.strerror}.") from error
    try:
        yield
    finally:
        lock.release()


def _append(peers_file: Path, line: str) -> None:
    """In one step for whoever reads it; owner and mode stay, or an engine of another user could not read it again."""
    temporary = peers_file.with_name(f".{peers_file.name}.{os.getpid()}")
    try:
        before = peers_file.read_text() if peers_file.exists() else ""
        temporary.write_text(before + ("\n" if before and not before.endswith("\n") else "") + line + "\n")
        if peers_file.exists():
            status = peers_file.stat()
            os.chown(temporary, status.st_uid, status.st_gid)
            os.chmod(temporary, stat.S_IMODE(status.st_mode))
        os.replace(temporary, peers_file)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {peers_file}: {error.strerror}.") from error


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a public key from {path}: {error}.") from error


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m pdkv.keys", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True, metavar="make|show|allow")
    make = commands.add_parser("make", help="make a pair of keys; existing files are never overwritten")
    make.add_argument("file", type=Path, help="where the secret key goes; the public one is written to FILE.pub")
    show = commands.add_parser("show", help="print the public key of a pair")
    show.add_argument("file", type=Path)
    add = commands.add_parser("allow", help="add a public key to a peers file")
    add.add_argument("peers_file", type=Path)
    add.add_argument("public_key", help="64 hex digits, or a file that holds them, such as FILE.pub")
    add.add_argument("--name", required=True, help="one word by which logs call the peer")
    add.add_argument("--address", help="host:port where the peer listens; without one it only connects to us")
    return parser
