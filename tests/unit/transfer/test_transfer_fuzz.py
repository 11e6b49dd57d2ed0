"""I14: every message survives the wire, any bytes are refused or understood, and no message hurts an endpoint."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from message_strategies import MESSAGES, engine_ids, messages
from transfer_pair import Loaded, Pair, nothing_is_left

from pdkv.errors import ProtocolError
from pdkv.transfer import BlockRun
from pdkv.transfer.messages import AnyMessage, Message, decode, encode, type_of
from pdkv.transfer.sidechannel.hello import AnyHello, Declined, Hello, Versions, decode_hello, encode_hello
from pdkv.transfer.sidechannel.loop import require_own_words

pytestmark = pytest.mark.cpu

# Shrinking sequences of messages takes minutes; what hypothesis found first is short enough to read.
PHASES = [phase for phase in Phase if phase is not Phase.shrink]
QUICK = settings(phases=PHASES, max_examples=25, deadline=None)
TABLES = 10_000  # nothing that a few hundred messages can fill may hold more


@pytest.mark.parametrize("name", MESSAGES)
@given(st.data())
def test_I14_every_message_comes_back_as_it_was_and_is_plain_messagepack(name: str, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[name])
    frame = encode(message)
    assert decode(frame) == message
    fields = msgpack.unpackb(frame[5:])
    assert fields["type"] == type_of(message) == name
    assert fields["sender"] == [message.sender.engine_id, message.sender.generation]
    assert decode(frame[:5] + msgpack.packb(fields)) == message


def test_every_type_of_message_is_fuzzed() -> None:
    assert set(MESSAGES) == {str(kind.__struct_config__.tag) for kind in AnyMessage.__args__}


@given(messages, st.text(min_size=1, max_size=20), st.integers() | st.text(max_size=5) | st.none())
def test_I14_a_field_that_is_not_known_is_refused(message: Message, name: str, value: object) -> None:
    fields = msgpack.unpackb(encode(message)[5:])
    if name in fields or (isinstance(value, int) and not -(2**63) <= value < 2**64):
        return
    with pytest.raises(ProtocolError):
        decode(b"PDKV\x01" + msgpack.packb(fields | {name: value}))


@given(messages, st.data())
def test_I14_a_message_with_some_bytes_changed_is_a_message_or_refused(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame)))
        frame[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    try:
        again = decode(bytes(frame))
    except ProtocolError:
        return
    assert isinstance(again, Message)
    encode(again)


@given(st.binary(max_size=200))
def test_I14_any_bytes_in_an_introduction_are_understood_or_refused(noise: bytes) -> None:
    for frame in (noise, b"PDKH" + noise):
        try:
            assert isinstance(decode_hello(frame), AnyHello)
        except ProtocolError:
            continue


@given(engine_ids, st.integers(1, 255), st.integers(1, 255))
def test_introductions_come_back_as_they_were(name: str, lowest: int, highest: int) -> None:
    for hello in (Hello(engine_id=name, versions=Versions(lowest, highest)), Declined(reason=name)):
        assert decode_hello(encode_hello(hello)) == hello


def is_a_strangers_own(message: AnyMessage) -> bool:
    sender = message.sender.engine_id
    try:
        require_own_words(message, sender, ())
    except ProtocolError:
        return False
    return sender not in ("P/1", "D/1")


@pytest.mark.parametrize("mode", ["pull", "push"])
@QUICK
@given(data=st.data())
def test_I14_no_sequence_of_messages_hurts_an_endpoint_or_the_request_of_others(mode: str, data: st.DataObject) -> None:
    """A request is loaded while strangers say anything that a carrier lets them: nothing in another's name."""
    pair = Pair(mode)
    noise = data.draw(st.lists(messages.filter(is_a_strangers_own), max_size=10))
    pair.loading()
    for message in noise:
        for endpoint in (pair.prefill, pair.decode):
            endpoint.received(message)
            endpoint.tick()
    pair.lose = lambda message: message.receiver.engine_id not in ("P/1", "D/1")
    pair.deliver()
    pair.transfer_ended()
    assert [loaded.request_id for loaded in pair.seen(Loaded)] == ["d"]
    assert pair.freed("P") == {1, 2, 3}
    pair.wait(700, step_s=20)
    assert nothing_is_left(pair)


@pytest.mark.parametrize("mode", ["pull", "push"])
@QUICK
@given(data=st.data())
def test_I14_no_sequence_of_messages_in_anybodys_name_ends_an_endpoint(mode: str, data: st.DataObject) -> None:
    """Whatever the request's own peers say, blocks come back and the endpoints go on."""
    pair = Pair(mode)
    pair.decode.arrived("d", pair.prefilled(), 40)
    pair.deliver()
    pair.decode.allocated("d", (BlockRun(0, (11, 12, 13)),))
    for message in data.draw(st.lists(messages, max_size=10)):
        for endpoint in (pair.prefill, pair.decode):
            endpoint.received(message)
    pair.lose = lambda message: message.receiver.engine_id not in ("P/1", "D/1")
    pair.deliver()
    pair.decode.agent_rebuilt(2, pair.decode.descriptor)
    pair.prefill.agent_rebuilt(2, pair.prefill.descriptor)
    pair.wait(1500, step_s=20)
    pair.collect()
    assert pair.freed("P") == {1, 2, 3}
    assert len(pair.prefill._used._used) < TABLES
    assert not pair.decode.holders()
