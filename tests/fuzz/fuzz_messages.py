"""Coverage-guided fuzzing of everything that a peer can say, against engines' parts that live as long as the run.

    make fuzz                                       # ten minutes; installs atheris into build/atheris
    python tests/fuzz/fuzz_messages.py [--minutes 10] [--json FILE] [--only NAME,..] [FOLDER] [atheris' own options]

An input names a target and is a sequence of frames. An exception that the engine does not expect from a peer, a table
beyond its bound, a descriptor that stays open, or a request that does not end is a finding: atheris prints the input
and stops, and the program exits with 1. Inputs that reach new code are kept in the folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import atheris
import msgspec

from pdkv.arguments import MINUTES

with atheris.instrument_imports(include=["pdkv.transfer", "pdkv.memory.imported", "pdkv_connectors"]):
    from endpoints import Endpoints
    from transports import Descriptions, IpcSocket, UcxConnection

MAX_FRAMES = 12


class Target(Protocol):
    """What hears frames; `seeds` holds one valid frame of each kind."""

    seeds: list[bytes]

    def run(self, frames: list[bytes]) -> None: ...


KINDS = {"endpoints": Endpoints, "descriptions": Descriptions, "ipc": IpcSocket, "ucx": UcxConnection}
_unpack, _pack = msgspec.msgpack.decode, msgspec.msgpack.encode


class Fuzzer:
    """Runs inputs, makes new ones, and writes down twice a second how many of each target it has run."""

    def __init__(self, names: list[str], counts: Path) -> None:
        self.names = names
        self.targets: list[Target] = [KINDS[name]() for name in names]
        self.runs: Counter[str] = Counter()
        self._counts, self._written_at = counts, 0.0

    def run(self, data: bytes) -> None:
        """What atheris calls."""
        if not data:
            return
        number = data[0] % len(self.targets)
        self.runs[self.names[number]] += 1
        if time.monotonic() - self._written_at > 0.5:
            self._counts.write_text(json.dumps(self.runs))
            self._written_at = time.monotonic()
        self.targets[number].run(frames_of(data[1:]))

    def mutate(self, data: bytes, max_size: int, seed: int) -> bytes:
        """Change one value in one message, in place of bytes, most of the time: bytes rarely leave a message valid."""
        chance = random.Random(seed)
        if not data or chance.random() < 0.05:
            data = bytes([chance.randrange(256)]) + data[1:]
        kind, frames = data[:1], frames_of(data[1:])
        seeds = self.targets[kind[0] % len(self.targets)].seeds
        roll = chance.random()
        if roll < 0.15:
            return kind + bytes(atheris.Mutate(data[1:], max_size - 1))
        if roll < 0.3 or not frames:
            frames.insert(chance.randint(0, len(frames)), chance.choice(seeds))
        elif roll < 0.4 and len(frames) > 1:
            del frames[chance.randrange(len(frames))]
        else:
            at = chance.randrange(len(frames))
            frames[at] = changed_frame(frames[at], chance)
        return (kind + joined(frames))[:max_size]

    def write_seeds(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for number, target in enumerate(self.targets):
            inputs = [joined([frame]) for frame in target.seeds] + [joined(target.seeds[:MAX_FRAMES])]
            for index, frames in enumerate(inputs):
                (folder / f"seed-{self.names[number]}-{index}").write_bytes(bytes([number]) + frames)


def frames_of(data: bytes) -> list[bytes]:
    """Two bytes of length before each frame; what does not fit is one frame."""
    frames, at = [], 0
    while at + 2 <= len(data) and len(frames) < MAX_FRAMES:
        size = int.from_bytes(data[at : at + 2], "big")
        frames.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return frames


def joined(frames: list[bytes]) -> bytes:
    return b"".join(min(len(frame), 65_535).to_bytes(2, "big") + frame[:65_535] for frame in frames)


def changed_frame(frame: bytes, chance: random.Random) -> bytes:
    """One value of it changed; messages of the side channel have five bytes before the MessagePack."""
    size = 5 if frame[:3] == b"PDK" else 0
    try:
        return frame[:size] + _pack(changed(_unpack(frame[size:]), chance))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
        return frame[:size] + bytes(atheris.Mutate(frame[size:], 256))


def changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.95:
        name = chance.choice(sorted(value, key=str))
        return value | {name: changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], changed(value[at], chance), *value[at + 1 :]]
    if isinstance(value, bytes) and len(value) > 8 and chance.random() < 0.8:
        return changed_frame(value, chance)  # a message within a message, maybe
    if isinstance(value, int) and chance.random() < 0.4:
        return value + chance.choice((-1, 1, -value, 7, 4096, -4096, value, 2**20, 2**40))
    return chance.choice(
        (
            chance.choice((0, 1, 2, 3, -1, 2**31, 2**31 - 1, 2**53, 2**53 + 1, 2**56, 2**63)),
            chance.choice(("P/1", "D/1", "X/1", "", "ENDED", "live", "ABORT", "bfloat16", "é" * 257)),
            chance.choice((0.0, 1.5, 86_400.0, float("nan"), float("inf"))),
            chance.randbytes(32),
            None,
            [],
            {},
            value,
        )
    )


def fuzz(names: list[str], folder: Path, counts: Path, options: list[str]) -> None:
    """In a process of its own, which atheris ends, and an input may."""
    logging.disable(logging.CRITICAL)
    fuzzer = Fuzzer(names, counts)
    fuzzer.write_seeds(folder)
    atheris.Setup(["fuzz_messages", *options, str(folder)], fuzzer.run, custom_mutator=fuzzer.mutate)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--minutes", type=MINUTES, default=10.0)
    parser.add_argument("--json", type=Path, help="write what ran, and what was found")
    parser.add_argument("--only", default=",".join(KINDS), help="some of %(default)s")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments, options = parser.parse_known_args()
    names = arguments.only.split(",")
    if arguments.child is not None:
        fuzz(names, arguments.folder, arguments.child, options)
        return 0
    began, when = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    arguments.folder.mkdir(parents=True, exist_ok=True)
    counts = arguments.folder.with_name(arguments.folder.name + "-counts.json")
    counts.write_text("{}")
    limit = f"-max_total_time={math.ceil(60 * arguments.minutes)}"
    ran = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--child", str(counts), limit, f"-artifact_prefix={counts.parent}/"],
        check=False,
    )
    record = {
        "program": "fuzz_messages",
        "date": when,
        "command": " ".join(["python", "tests/fuzz/fuzz_messages.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("atheris", "msgspec")}},
        "seconds": round(time.monotonic() - began, 1),
        "executions": json.loads(counts.read_text()),
        "exit_code": ran.returncode,
        "result": "a finding; see the log" if ran.returncode else "no finding",
    }
    print(json.dumps(record, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if ran.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
