"""The side channel carries messages between engines that have introduced themselves, over IPv4 and IPv6."""

from __future__ import annotations

import os
import select
import socket
import threading

import msgpack
import pytest
from sidechannel_hosts import load_over
from sidechannel_net import (
    connected,
    connecting_to,
    done,
    exchange,
    hello,
    meet,
    numbers,
    receive,
    stranger,
    until,
)

from pdkv.errors import ConfigError, ProtocolError, StateError
from pdkv.transfer import EngineRef
from pdkv.transfer.messages import FailCode, Refuse, Register, TransferKey
from pdkv.transfer.sidechannel import Address, Limits, SideChannel, SideChannelSettings
from pdkv.transfer.sidechannel.hello import Accepted, Declined, Versions, agree, decode_hello

pytestmark = pytest.mark.cpu


def test_messages_go_both_ways_over_one_connection() -> None:
    with connected() as (prefill, decode):
        exchange(decode, prefill, 7)
        assert decode.describe_state()["guests"] == []
        assert prefill.describe_state()["guests"] == ["D/1"]
        until(lambda: prefill.counters.as_dict() == {"received": 1, "sent": 1})


def test_messages_of_one_peer_arrive_in_order() -> None:
    with connected() as (prefill, decode):
        for number in range(500):
            assert decode.send(done("D/1", "P/1", number))
        assert numbers(receive(prefill, 500)) == list(range(500))


def test_port_0_gives_a_real_port_which_is_published() -> None:
    with SideChannel("P/1") as channel:
        assert channel.address is not None
        assert channel.address.port > 0
        assert channel.describe_state()["address"] == str(channel.address)


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_ipv6_works_as_ipv4_does() -> None:
    with (
        SideChannel("P/1", SideChannelSettings(bind=Address.parse("[::1]:0"))) as prefill,
        SideChannel("D/1", connecting_to(prefill.address)) as decode,
    ):
        assert str(prefill.address).startswith("[::1]:")
        meet(prefill, decode)
        exchange(decode, prefill, 1)


def test_the_descriptor_is_readable_as_long_as_there_is_something_to_receive() -> None:
    with connected() as (prefill, decode):
        poll = select.poll()
        poll.register(prefill.fileno(), select.POLLIN)
        assert not poll.poll(0)
        for number in range(300):
            decode.send(done("D/1", "P/1", number))
        until(lambda: prefill.counters["received"] == 300)
        taken = 0
        while poll.poll(0):
            taken += len(prefill.receive())
        assert taken == 300
        assert prefill.receive() == ()


def test_the_largest_message_passes_and_a_larger_one_is_refused_by_its_sender() -> None:
    ids = tuple(range(2**31 - 65_536, 2**31))
    with connected() as (prefill, decode):
        sender, receiver = EngineRef("D/1", 1), EngineRef("P/1", 1)
        key = TransferKey("r", 0, 0)
        register = Register(
            sender=sender,
            receiver=receiver,
            key=key,
            num_tokens=1,
            runs=((0, ids),),
            remaining_s=1.0,  # type: ignore[arg-type]
        )
        assert decode.send(register)
        (received,) = receive(prefill)
        assert isinstance(received, Register)
        assert received.runs[0].block_ids == ids
        with pytest.raises(ProtocolError, match="limit"):
            decode.send(
                Register(
                    sender=sender,
                    receiver=receiver,
                    key=key,
                    num_tokens=1,
                    runs=((0, ids * 8),),  # type: ignore[arg-type]
                    remaining_s=1.0,
                )
            )


def test_a_message_for_someone_unknown_is_dropped_and_counted() -> None:
    with connected() as (prefill, _):
        assert prefill.send(done("P/1", "D/9"))
        until(lambda: prefill.counters["unroutable"] == 1)


def test_a_peer_that_has_left_is_noticed_when_it_is_sent_to() -> None:
    with connected() as (prefill, decode):
        decode.close()
        until(lambda: prefill.send(done("P/1", "D/1")) and prefill.counters["peer_left"] > 0)
        assert not prefill.wait_for_peer("D/1", 0) or prefill.counters["unroutable"]


def test_a_restarted_prefill_is_met_again_and_answers_for_the_engine_that_was_there() -> None:
    old = SideChannel("P/1")
    with SideChannel("D/1", connecting_to(old.address)) as decode:
        meet(old, decode)
        old.close()
        with SideChannel("P/2", SideChannelSettings(bind=old.address)) as new:
            meet(new, decode)
            decode.send(done("D/1", "P/1", 5))
            (message,) = receive(new)
            assert message.receiver.engine_id == "P/1"
            new.send(
                Refuse(
                    sender=EngineRef("P/2", 1),
                    receiver=message.sender,
                    meant=message.receiver,
                    code=FailCode.WRONG_ENGINE,
                    reason="another engine has taken this address",
                )
            )
            (answer,) = receive(decode)
            assert isinstance(answer, Refuse)


def test_a_peer_that_is_not_there_yet_is_met_when_it_comes() -> None:
    with SideChannel("X/1") as placeholder:
        address = placeholder.address
    with SideChannel("D/1", connecting_to(address)) as decode:
        assert not decode.wait_for_peer("P/1", 0.0)
        with SideChannel("P/1", SideChannelSettings(bind=address)) as prefill:
            meet(prefill, decode)
            exchange(decode, prefill, 1)


@pytest.mark.parametrize(("lowest", "highest"), [(2, 3), (9, 9)])
def test_versions_without_overlap_are_declined_with_both_named(lowest: int, highest: int) -> None:
    with connected() as (prefill, decode):
        with stranger(prefill.address) as peer:
            peer.send(hello("D/2", lowest, highest))
            answer = decode_hello(peer.recv())
        assert isinstance(answer, Declined)
        assert f"version {Versions(lowest, highest)} and this engine 1" in answer.reason
        exchange(decode, prefill, 1)


def test_the_highest_version_that_both_speak_is_taken() -> None:
    assert agree(Versions(1, 4), Versions(2, 9)) == 4
    assert agree(Versions(3, 3), Versions(1, 3)) == 3
    with pytest.raises(ProtocolError, match="version 1 to 2 and this engine 3 to 4"):
        agree(Versions(3, 4), Versions(1, 2))
    with connected() as (prefill, _), stranger(prefill.address) as peer:
        peer.send(hello("D/2", 1, 7))
        assert decode_hello(peer.recv()) == Accepted(engine_id="P/1", version=1)


def test_what_is_on_the_wire_is_plain_messagepack() -> None:
    with connected() as (prefill, decode), stranger(prefill.address) as peer:
        peer.send(b"PDKH" + msgpack.packb({"type": "HELLO", "engine_id": "M/1", "versions": [1, 1]}))
        answer = peer.recv()
        assert answer[:4] == b"PDKH"
        assert msgpack.unpackb(answer[4:]) == {"type": "ACCEPTED", "engine_id": "P/1", "version": 1}
        prefill.send(done("P/1", "M/1", 3))
        frame = peer.recv()
        assert frame[:5] == b"PDKV\x01"
        fields = msgpack.unpackb(frame[5:])
        assert fields == {
            "type": "DONE",
            "sender": ["P/1", 1],
            "receiver": ["M/1", 1],
            "floor": 0,
            "key": ["r", 3, 0],
            "claim": None,
        }
        fields |= {"sender": ["M/1", 1], "receiver": ["P/1", 1]}
        peer.send(b"PDKV\x01" + msgpack.packb(fields))
        assert numbers(receive(prefill)) == [3]
        peer.send(b"PDKV\x01" + msgpack.packb(fields | {"extra": 1}))
        until(lambda: prefill.counters["malformed"] == 1)
        exchange(decode, prefill, 1)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_the_endpoints_speak_over_side_channels(mode: str) -> None:
    with connected() as (prefill, decode):
        assert load_over(prefill, decode, mode) == [1, 2, 3]


def test_it_is_closed_once_and_leaves_no_thread_and_no_descriptor() -> None:
    with connected() as (prefill, decode):
        exchange(decode, prefill, 1)
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with connected() as (prefill, decode):
            exchange(decode, prefill, 1)
        prefill.close()
    assert threading.active_count() == threads
    assert len(set(os.listdir("/proc/self/fd")) - descriptors) <= 1
    with pytest.raises(StateError, match="closed"):
        prefill.send(done("P/1", "D/1"))
    with pytest.raises(StateError, match="closed"):
        prefill.receive()


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with (
        SideChannel("P/1") as first,
        pytest.raises(ConfigError, match=r"port \d+ on 127.0.0.1 is in use"),
    ):
        SideChannel("P/2", SideChannelSettings(bind=first.address))


def test_a_queue_that_is_full_refuses_and_counts() -> None:
    limits = Limits(outgoing_messages=10)
    with SideChannel("P/1", SideChannelSettings(limits=limits)) as channel:
        with channel._loop._lock:  # the sockets are in use
            taken = [channel.send(done("P/1", "D/1")) for _ in range(12)]
        assert taken == [True] * 10 + [False] * 2
        assert channel.counters["outgoing_overflows"] == 2
