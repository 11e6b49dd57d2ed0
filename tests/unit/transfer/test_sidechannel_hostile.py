"""I14: peers that send garbage, half frames, huge frames or too much harm nobody else."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from message_strategies import messages
from sidechannel_net import connected, connecting_to, done, exchange, hello, numbers, receive, stranger, until

from pdkv.transfer.messages import MAX_MESSAGE_NBYTES, encode
from pdkv.transfer.sidechannel import Address, Limits, SideChannel
from pdkv.transfer.sidechannel.hello import Accepted, decode_hello

pytestmark = pytest.mark.cpu

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL" + bytes(16) + b"\0" + bytes(31)  # ZMTP 3.1, whole
FEW = Limits(inbox_messages=50, peer_messages=20)

Pair = tuple[SideChannel, SideChannel]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """One pair for all: each test leaves it as it found it, or the next one fails."""
    with connected(limits=Limits(handshake_s=0.2)) as both:
        yield both


def tcp(channel: SideChannel) -> socket.socket:
    assert channel.address is not None
    return socket.create_connection((channel.address.host, channel.address.port), timeout=20)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(noise=st.binary(max_size=300), cut=st.integers(0, len(GREETING)))
def test_I14_any_bytes_on_the_socket_leave_the_others_alone(pair: Pair, noise: bytes, cut: int) -> None:
    prefill, decode = pair
    for start in (b"", GREETING[:cut], GREETING):
        with tcp(prefill) as raw:
            raw.sendall(start + noise)
    exchange(decode, prefill, cut)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    frames=st.lists(
        st.one_of(
            st.binary(max_size=100),
            st.binary(max_size=100).map(lambda noise: b"PDKV\x01" + noise),
            st.binary(max_size=100).map(lambda noise: b"PDKH" + noise),
            messages.map(encode),
            st.just(hello("X/1")),
        ),
        max_size=10,
    ),
    parts=st.integers(1, 3),
)
def test_I14_any_frames_leave_the_others_alone(pair: Pair, frames: list[bytes], parts: int) -> None:
    prefill, decode = pair
    with stranger(prefill.address) as peer:
        for frame in frames:
            peer.send_multipart([frame] * parts)
        peer.send(hello("X/2"))  # arrives after the others
        until(lambda: "X/2" in str(prefill.describe_state()["guests"]))
    prefill.receive()  # a stranger may say what is valid, in its own name
    exchange(decode, prefill, 1)
    assert len(prefill.describe_state()["guests"]) <= 4  # type: ignore[arg-type]


def test_I14_a_frame_that_is_too_large_ends_its_connection_and_no_other(pair: Pair) -> None:
    prefill, decode = pair
    with stranger(prefill.address) as peer:
        peer.send(hello("X/3"))
        assert isinstance(decode_hello(peer.recv()), Accepted)
        peer.send(b"PDKV\x01" + bytes(MAX_MESSAGE_NBYTES))
        exchange(decode, prefill, 1)
    before = prefill.counters["malformed"]
    exchange(decode, prefill, 2)
    assert prefill.counters["malformed"] == before, "the frame never reached the channel"


def test_I14_connections_that_say_nothing_are_closed_and_cost_nobody_anything(pair: Pair) -> None:
    prefill, decode = pair
    idle = [tcp(prefill) for _ in range(100)]
    try:
        exchange(decode, prefill, 1)
        for raw in idle:
            while raw.recv(256):  # its half of the greeting, then the end
                pass
    finally:
        for raw in idle:
            raw.close()
    exchange(decode, prefill, 2)


def test_I14_a_half_frame_delays_only_its_sender(pair: Pair) -> None:
    prefill, decode = pair
    with tcp(prefill) as raw:
        raw.sendall(GREETING + b"\x04\x19\x05READY" + b"\x0bSocket-Type\0\0\0\x06DEALER")
        raw.sendall(b"\x02" + (2**20).to_bytes(8, "big") + b"half")  # a long frame that never ends
        exchange(decode, prefill, 1)


def test_a_peer_that_floods_fills_its_own_room_only() -> None:
    with connected(limits=FEW) as (prefill, decode), stranger(prefill.address) as flooder:
        flooder.send(hello("X/1"))
        assert isinstance(decode_hello(flooder.recv()), Accepted)
        for number in range(5000):
            flooder.send(encode(done("X/1", "P/1", number)))
        until(lambda: prefill.counters["inbox_overflows"] > 1000)
        decode.send(done("D/1", "P/1", 7))
        until(lambda: prefill.counters["received"] == FEW.inbox_messages + 1)
        received = receive(prefill)
        assert 7 in numbers([message for message in received[:2] if message.sender.engine_id == "D/1"])
        assert len(received) == FEW.inbox_messages + 1


def test_messages_that_are_large_fill_a_peers_room_too() -> None:
    frame = encode(done("X/1", "P/1"))
    with connected(limits=Limits(inbox_nbytes=10 * len(frame))) as (prefill, decode), stranger(prefill.address) as peer:
        peer.send(hello("X/1"))
        peer.recv()
        for _ in range(12):
            peer.send(frame)
        until(lambda: prefill.counters["inbox_overflows"] == 2)
        exchange(decode, prefill, 1) if not prefill.receive() else None
        exchange(decode, prefill, 2)


def test_a_peer_that_does_not_read_costs_its_own_messages_only() -> None:
    with connected(limits=FEW) as (prefill, decode), stranger(prefill.address) as deaf:
        deaf.send(hello("X/1"))
        until(lambda: prefill.wait_for_peer("X/1", 0))
        blob = done("P/1", "X/1")
        until(lambda: all(prefill.send(blob) for _ in range(100)) and prefill.counters["peer_queue_full"] > 0)
        exchange(decode, prefill, 1)


def test_messages_before_an_introduction_are_dropped_and_answered_with_what_is_missing(pair: Pair) -> None:
    prefill, decode = pair
    with stranger(prefill.address) as peer:
        peer.send(encode(done("X/1", "P/1")))
        assert "say HELLO first" in str(decode_hello(peer.recv()))
    exchange(decode, prefill, 1)


def test_more_peers_than_there_is_room_for_push_out_who_is_silent_and_it_comes_back() -> None:
    with connected(limits=Limits(max_guests=5)) as (prefill, decode):
        for number in range(12):
            with stranger(prefill.address) as peer:
                peer.send(hello(f"X/{number}"))
                assert isinstance(decode_hello(peer.recv()), Accepted)
        until(lambda: prefill.counters["guests_evicted"] > 0)
        assert len(prefill.describe_state()["guests"]) <= 5  # type: ignore[arg-type]
        decode.send(done("D/1", "P/1"))  # dropped: it must introduce itself again
        until(lambda: prefill.wait_for_peer("D/1", 0) and decode.wait_for_peer("P/1", 0))
        prefill.receive()
        exchange(decode, prefill, 1)


FEW_DESCRIPTORS = """
import resource, sys
from pdkv.transfer.sidechannel import Limits, SideChannel, SideChannelSettings
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
channel = SideChannel("P/1", SideChannelSettings(limits=Limits(handshake_s=0.5)))
print(channel.address, flush=True)
channel.wait(60)
print(len(channel.receive()), flush=True)
sys.stdin.read()
"""


def test_more_connections_than_descriptors_do_not_end_the_engine() -> None:
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = Address.parse(process.stdout.readline().strip())
        idle = [socket.create_connection((address.host, address.port), timeout=20) for _ in range(120)]
        for raw in idle:
            raw.close()
        with SideChannel("D/1", connecting_to(address)) as decode:
            assert decode.wait_for_peer("P/1", 60)
            decode.send(done("D/1", "P/1"))
            assert process.stdout.readline() == "1\n"
        process.communicate("", timeout=60)
        assert process.returncode == 0
