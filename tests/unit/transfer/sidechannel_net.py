"""Side channels on this machine, and peers that do not keep to the protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from pdkv.transfer.messages import AnyMessage, Done, EngineRef, Keyed, TransferKey
from pdkv.transfer.sidechannel import Address, KeyPair, PeerEntry, SideChannel, SideChannelSettings, StaticPeers
from pdkv.transfer.sidechannel.hello import Hello, Versions, encode_hello
from pdkv.transfer.sidechannel.keyfiles import as_z85

DEADLINE_S = 20.0


def done(sender: str, receiver: str, number: int = 0) -> Done:
    return Done(sender=EngineRef(sender, 1), receiver=EngineRef(receiver, 1), key=TransferKey("r", number, 0))


def connecting_to(*addresses: Address | None, **settings: Any) -> SideChannelSettings:
    """Settings of an engine that listens nowhere."""
    return SideChannelSettings(bind=None, peers=StaticPeers.at([str(address) for address in addresses]), **settings)


@contextmanager
def connected(**settings: Any) -> Iterator[tuple[SideChannel, SideChannel]]:
    """Prefill ``P/1``, which listens, and decode ``D/1``, which is connected to it."""
    with (
        SideChannel("P/1", SideChannelSettings(**settings)) as prefill,
        SideChannel("D/1", connecting_to(prefill.address)) as decode,
    ):
        meet(prefill, decode)
        yield prefill, decode


def meet(prefill: SideChannel, decode: SideChannel) -> None:
    assert decode.wait_for_peer(prefill.engine_id, DEADLINE_S), decode.describe_state()
    assert prefill.wait_for_peer(decode.engine_id, DEADLINE_S)


def receive(channel: SideChannel, count: int = 1) -> list[AnyMessage]:
    """The next messages."""
    until = time.monotonic() + DEADLINE_S
    messages: list[AnyMessage] = []
    while len(messages) < count and channel.wait(until - time.monotonic()):
        messages.extend(channel.receive())
    assert len(messages) >= count, f"{len(messages)} of {count} messages; {channel.describe_state()}"
    return messages


def numbers(messages: list[AnyMessage]) -> list[int]:
    return [message.key.transfer_id for message in messages if isinstance(message, Keyed)]


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.001)


def exchange(one: SideChannel, other: SideChannel, number: int) -> None:
    """Both can still be used."""
    assert one.send(done(one.engine_id, other.engine_id, number))
    assert numbers(receive(other)) == [number]
    assert other.send(done(other.engine_id, one.engine_id, number))
    assert numbers(receive(one)) == [number]


@contextmanager
def stranger(address: Address | None, keys: KeyPair | None = None, server: bytes | None = None) -> Iterator[Any]:
    """A DEALER that says what the test wants it to."""
    context: Any = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = socket.sndtimeo = round(1000 * DEADLINE_S)
    if keys is not None and server is not None:
        socket.curve_publickey, socket.curve_secretkey = as_z85(keys.public), as_z85(keys.secret)
        socket.curve_serverkey = as_z85(server)
    assert address is not None
    socket.connect(address.endpoint)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


def hello(engine_id: str = "X/1", lowest: int = 1, highest: int = 1) -> bytes:
    return encode_hello(Hello(engine_id=engine_id, versions=Versions(lowest, highest)))


def write_peers(path: Path, *entries: PeerEntry) -> Path:
    """A peers file, replaced at once."""
    lines = [
        " ".join([e.public_key.hex() if e.public_key else "-", e.name, *([str(e.address)] if e.address else [])])
        for e in entries
    ]
    temporary = path.with_name(path.name + ".new")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(path)
    return path
