"""Coverage-guided fuzzing of everything that a peer can say, against endpoints that live as long as the run.

    pip install atheris            # not locked: it has wheels for few Pythons (3.11 to 3.13 with atheris 3.0)
    python tests/fuzz/fuzz_messages.py -max_total_time=600 build/fuzz     # inputs that reach new code are kept there

An input is a sequence of frames. Each is decoded as the side channel does, and given to one prefill and one decode
endpoint, which meanwhile serve requests. An exception other than ProtocolError, a table beyond its bound, or a request
of their own that does not end is a finding: atheris prints the input and stops. See -help=1 for its options.
"""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["pdkv.transfer"]):
    from pdkv.errors import ProtocolError
    from pdkv.transfer import messages as wire
    from pdkv.transfer.actions import PostRead, PostWrite, Send
    from pdkv.transfer.blocks import BlockRun
    from pdkv.transfer.consumer import Consumer
    from pdkv.transfer.consumer_state import ConsumerSettings
    from pdkv.transfer.issued import ReferenceSettings
    from pdkv.transfer.leases import LeaseSettings
    from pdkv.transfer.producer import Producer
    from pdkv.transfer.producer_books import ProducerSettings
    from pdkv.transfer.reference import Reference
    from pdkv.transfer.sidechannel.hello import Hello, Versions, decode_hello, encode_hello

import msgspec

MAX_FRAMES = 12
STEP_S = 2.5
BOUND = 256  # of every table in this run, set below or far above what honest requests need

P, D = wire.EngineRef("P/1", 1), wire.EngineRef("D/1", 1)
COMPATIBILITY = wire.Compatibility(
    model="m", dtype="float32", cache_dtype="auto", layout="LBNHC", block_size=16, connector="fuzz/1"
)
DESCRIPTOR = wire.Descriptor(compatibility=COMPATIBILITY, num_blocks=1000, metadata=b"agent")


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class World:
    """Two endpoints, and honest requests between them, one after the other."""

    def __init__(self, mode: str) -> None:
        self.clock = Clock()
        prefill = ProducerSettings(
            max_early=BOUND,
            lease=LeaseSettings(max_leases=BOUND, max_ended=BOUND),
            reference=ReferenceSettings(max_issued=BOUND),
        )
        decode = ConsumerSettings(mode=mode, max_used=BOUND)  # type: ignore[arg-type]
        self.prefill = Producer(self.clock, P, DESCRIPTOR, prefill)
        self.decode = Consumer(self.clock, D, DESCRIPTOR, decode)
        self.reference: Reference | None = None
        self.number = 0

    def begin(self) -> None:
        """One more request, whose messages the input may join or foil."""
        self.number += 1
        name = f"r{self.number}"
        self.reference = self.prefill.prefilled(name, (BlockRun(0, (1, 2, 3)),), 40)
        self.decode.arrived(name, self.reference, 40)
        self.decode.allocated(name, (BlockRun(0, (4, 5, 6)),))

    def hear(self, message: wire.AnyMessage) -> None:
        for endpoint in (self.prefill, self.decode):
            endpoint.received(self._made_to_fit(message))

    def _made_to_fit(self, message: wire.AnyMessage) -> Any:
        """Half of the claims become genuine, and small request numbers those of the request in hand."""
        if not isinstance(message, wire.Keyed) or self.reference is None:
            return message
        key = msgspec.structs.replace(message.key, request_id=self.reference.request_id)
        if message.claim is not None and message.claim.digest[0] % 2:
            message = msgspec.structs.replace(message, claim=self.reference.claim(message.claim.use), key=key)
        return message

    def turn(self) -> None:
        """Time passes; what the endpoints want is done, honestly."""
        self.clock.now += STEP_S
        self.prefill.tick()
        self.decode.tick()
        for _ in range(4):
            for endpoint in (self.prefill, self.decode):
                for action in endpoint.take_actions():
                    self._do(action)

    def _do(self, action: object) -> None:
        if isinstance(action, Send):
            wire.encode(action.message)
            if action.engine_id == P.engine_id:
                self.prefill.received(action.message)  # type: ignore[arg-type]
            elif action.engine_id == D.engine_id:
                self.decode.received(action.message)  # type: ignore[arg-type]
        elif isinstance(action, PostRead):
            self.decode.read_ended(action.key, True)
        elif isinstance(action, PostWrite):
            self.prefill.write_ended(action.key, True)

    def check(self) -> None:
        """Nothing grows without bound, and no endpoint waits for what has passed."""
        prefill, decode = self.prefill, self.decode
        sizes = {
            "leases": len(prefill._leases),
            "references": len(prefill._references),
            "early": len(prefill._early),
            "unwanted": len(prefill._unwanted),
            "writes": len(prefill._writes),
            "takers": len(prefill._takers),
            "requests": len(decode._requests),
            "alive": len(decode._alive),
            "used": len(decode._used),
            "owed by D": len(decode._owed),
            "owed by P": len(prefill._owed),
            "handshakes": len(decode._handshakes),
        }
        too_large = {name: size for name, size in sizes.items() if size > BOUND}
        if too_large:
            raise AssertionError(f"beyond {BOUND}: {too_large}")
        for endpoint in (prefill, decode):
            due = endpoint.next_deadline()
            if due is not None and due < self.clock.now - 2 * STEP_S:
                raise AssertionError(f"{endpoint.me} is overdue since {due} at {self.clock.now}")


WORLDS = [World("pull"), World("push")]
_unpack, _pack = msgspec.msgpack.decode, msgspec.msgpack.encode


def frames_of(data: bytes) -> list[bytes]:
    """Two bytes of length before each frame; what does not fit is one frame."""
    frames, at = [], 0
    while at + 2 <= len(data) and len(frames) < MAX_FRAMES:
        size = int.from_bytes(data[at : at + 2], "big")
        frames.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return frames


def joined(frames: list[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(2, "big") + frame for frame in frames)


def test_one_input(data: bytes) -> None:
    """What atheris calls."""
    for world in WORLDS:
        world.begin()
        for frame in frames_of(data):
            for understand in (decode_hello, as_reference):
                try:
                    understand(frame)
                except ProtocolError:
                    continue
            try:
                world.hear(wire.decode(frame))
            except ProtocolError:
                continue
        world.turn()
        world.check()


def as_reference(frame: bytes) -> None:
    try:
        params = _unpack(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    Reference.from_params(params).digest()


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change one value in one message, in place of bytes, most of the time: bytes rarely leave a message valid."""
    chance = random.Random(seed)
    frames = frames_of(data)
    if not frames or chance.random() < 0.2:
        return bytes(atheris.Mutate(data, max_size))
    at = chance.randrange(len(frames))
    roll = chance.random()
    if roll < 0.15:
        frames.insert(at, chance.choice(SEEDS))
    elif roll < 0.25 and len(frames) > 1:
        del frames[at]
    else:
        head, body = frames[at][:5], frames[at][5:]
        try:
            frames[at] = head + _pack(_changed(_unpack(body), chance))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
            frames[at] = head + bytes(atheris.Mutate(body, 256))
    return joined(frames)[:max_size]


def _changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.95:
        name = chance.choice(sorted(value, key=str))
        return value | {name: _changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], _changed(value[at], chance), *value[at + 1 :]]
    return chance.choice(
        (
            chance.choice((0, 1, 2, 3, -1, 2**31, 2**53, 2**53 + 1, 2**63)),
            chance.choice(("P/1", "D/1", "X/1", "", "ENDED", "live", "ABORT", "é" * 257)),
            chance.choice((0.0, 1.5, 86_400.0, float("nan"), float("inf"))),
            chance.randbytes(32),
            None,
            [],
            {},
            value,
        )
    )


def seeds() -> list[bytes]:
    """One valid frame of each kind."""
    key, claim = wire.TransferKey("r1", 0, 0), wire.Claim(b"\1" * 32, bytes(32), 0)
    to_p: dict[str, Any] = {"sender": D, "receiver": P}
    to_d: dict[str, Any] = {"sender": P, "receiver": D}
    asked: dict[str, Any] = {**to_p, "key": key, "claim": claim}
    told: dict[str, Any] = {**to_d, "key": key}
    runs = (BlockRun(0, (7, 8, 9)),)
    found: list[wire.Message] = [
        wire.Handshake(**to_p, descriptor=DESCRIPTOR),
        wire.Welcome(**to_d, descriptor=DESCRIPTOR),
        wire.Refuse(**to_d, meant=P, code=wire.FailCode.ASLEEP, reason="x"),
        wire.Renew(**asked, sequence=1),
        wire.Renewed(**told, sequence=1, state=wire.LeaseState.LIVE, remaining_s=20.0),
        wire.Register(**asked, num_tokens=40, runs=runs, remaining_s=60.0),
        wire.Cancel(**asked),
        wire.Ack(**told, of="ABORT"),
        wire.Ack(**to_p, key=key, of="DONE"),
    ]
    for ends in (asked, told):
        found += [
            wire.Done(**ends),
            wire.Fail(**ends, code=wire.FailCode.TIMED_OUT, reason="x"),
            wire.Abort(**ends, reason="x"),
        ]
    hello = encode_hello(Hello(engine_id="X/1", versions=Versions(1, 1)))
    return [*(wire.encode(message) for message in found), hello]


SEEDS = seeds()


def main() -> None:
    """Write the seeds into the first folder that is named, then fuzz."""
    logging.disable(logging.CRITICAL)
    for folder in [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")][:1]:
        folder.mkdir(parents=True, exist_ok=True)
        for number, frame in enumerate(SEEDS):
            (folder / f"seed-{number}").write_bytes(joined([frame]))
    atheris.Setup(sys.argv, test_one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
