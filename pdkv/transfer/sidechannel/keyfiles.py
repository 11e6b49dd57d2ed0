"""Files that hold CurveZMQ keys: 32 bytes, written as 64 hex digits."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from pdkv.errors import ConfigError

KEY_NBYTES = 32
SECRET_MODE = 0o600
PUBLIC_MODE = 0o644


@dataclass(frozen=True, slots=True)
class KeyPair:
    """This engine's keys, 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        """A new pair, from libzmq's random source.

        Raises:
            ConfigError: this libzmq was built without CURVE.
        """
        if not zmq.has("curve"):
            raise ConfigError("this pyzmq was built without CURVE; install pyzmq's wheel from the package index.")
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))


def as_z85(key: bytes) -> bytes:
    """As ZeroMQ's options want it: 40 characters."""
    encoded: bytes = z85.encode(key)
    return encoded


def parse_key(text: str) -> bytes:
    """32 bytes from 64 hex digits.

    Raises:
        ConfigError: it is something else. The text is not repeated: it may be a secret.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_NBYTES or len(text) != 2 * KEY_NBYTES:
        raise ConfigError(f"a key is {2 * KEY_NBYTES} hex digits, and {len(text)} characters were found instead.")
    return key


def public_path(path: Path) -> Path:
    """Where the public key of a secret one lies."""
    return path.with_name(path.name + ".pub")


def write_key_pair(path: Path) -> KeyPair:
    """Make a pair: the secret key in `path` (mode 0600), the public one beside it in ``path.pub`` (0644).

    Either both files appear, whole, or none does.

    Raises:
        ConfigError: one of them exists, or cannot be written.
    """
    keys = KeyPair.generate()
    text = {public_path(path): (keys.public, PUBLIC_MODE), path: (keys.secret, SECRET_MODE)}
    made: list[Path] = []
    try:
        for where, (key, mode) in text.items():
            _write_new(where, key.hex() + "\n", mode)
            made.append(where)
    except OSError as error:
        for where in made:
            where.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise ConfigError(f"{error.filename} exists; keys are never overwritten, name another file.") from error
        raise ConfigError(
            f"cannot write a key to {path} ({error.strerror}); name a file in a folder of yours."
        ) from error
    return keys


def read_key_pair(path: Path) -> KeyPair:
    """The keys in `path` and ``path.pub``.

    Raises:
        ConfigError: a file is missing or damaged, or others may read the secret one.
    """
    try:
        with path.open() as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            secret = stream.read(1024).strip()
        public = public_path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys {path} and {public_path(path).name}: {error}.") from error
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others (mode {mode:04o}); make it private with `chmod 600 {path}`.")
    keys = KeyPair(_parse_file(public_path(path), public), _parse_file(path, secret))
    if zmq.curve_public(as_z85(keys.secret)) != as_z85(keys.public):
        raise ConfigError(f"{public_path(path)} is not the public key of {path}; make a new pair.")
    return keys


def _parse_file(path: Path, text: str) -> bytes:
    try:
        return parse_key(text)
    except ConfigError as error:
        raise ConfigError(f"{path} holds no key: {error}") from error


def _write_new(path: Path, text: str, mode: int) -> None:
    """Write a file that does not exist, whole or not at all. A link, unlike a rename, never replaces anything."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)  # whatever the umask
        try:
            os.link(temporary, path)
        except FileExistsError as error:
            raise FileExistsError(error.errno, error.strerror, str(path)) from error
    finally:
        os.unlink(temporary)
