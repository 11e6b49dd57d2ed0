"""One prefill and one decode endpoint that live as long as the run, serve requests, and hear what anybody says."""

from __future__ import annotations

from typing import Any

import msgspec

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


class Endpoints:
    """Each frame is decoded as the side channel does, and given to both endpoints, in pull and in push."""

    def __init__(self) -> None:
        self._worlds = [World("pull"), World("push")]
        self.seeds = _seeds()

    def run(self, frames: list[bytes]) -> None:
        for world in self._worlds:
            world.begin()
            for frame in frames:
                for understand in (decode_hello, _as_reference):
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


def _as_reference(frame: bytes) -> None:
    try:
        params = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    Reference.from_params(params).digest()


def _seeds() -> list[bytes]:
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
