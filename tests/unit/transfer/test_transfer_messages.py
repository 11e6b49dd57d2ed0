"""I14: what is on the wire is typed, bounded, versioned, and says durations only."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ProtocolError
from pdkv.transfer import messages
from pdkv.transfer.blocks import BlockRun
from pdkv.transfer.messages import (
    Claim,
    Done,
    EngineRef,
    FailCode,
    Refuse,
    Register,
    Renewed,
    TransferKey,
    decode,
    encode,
)
from pdkv.transfer.reference import Reference

pytestmark = pytest.mark.cpu

KEY = TransferKey("r", 7, 0)
MAC = bytes(range(32))
ENDS = {"sender": EngineRef("D/1", 1), "receiver": EngineRef("P/1", 2)}
DONE = Done(**ENDS, key=KEY)


def frame_of(fields: dict[str, object]) -> bytes:
    return b"PDKV\x01" + msgspec.msgpack.encode(fields)


def test_I14_a_message_comes_back_as_it_was() -> None:
    register = Register(
        **ENDS,
        floor=3,
        key=KEY,
        claim=Claim(MAC, MAC, 7),
        num_tokens=40,
        runs=(BlockRun(1, (5, 9)), BlockRun(0, ())),
        remaining_s=12.5,
    )
    assert decode(encode(register)) == register
    refuse = Refuse(**ENDS, meant=EngineRef("P/0", 1), code=FailCode.ASLEEP, reason="x")
    assert decode(encode(refuse)) == refuse


def test_I14_an_unknown_field_is_refused() -> None:
    fields = msgspec.to_builtins(DONE) | {"extra": 1}
    with pytest.raises(ProtocolError, match="extra"):
        decode(frame_of(fields))


@pytest.mark.parametrize(
    "change",
    [
        {"type": "EXEC"},
        {"key": ["r", -1, 0]},
        {"key": ["r", 1, 0, 0]},
        {"key": ["", 1, 0]},
        {"key": ["r" * 300, 1, 0]},
        {"sender": ["D/1"]},
        {"floor": "0"},
        {"claim": [b"short", MAC, 0]},
    ],
)
def test_I14_values_out_of_range_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="not valid"):
        decode(frame_of(msgspec.to_builtins(DONE) | change))


@pytest.mark.parametrize("block_id", [-1, 2**31])
def test_I14_a_negative_or_huge_block_id_is_refused_on_the_wire(block_id: int) -> None:
    register = Register(**ENDS, key=KEY, num_tokens=40, runs=(BlockRun(0, (1,)),), remaining_s=1.0)
    fields = msgspec.to_builtins(register) | {"runs": [[0, [block_id]]]}
    with pytest.raises(ProtocolError, match="not valid"):
        decode(frame_of(fields))


def test_I14_more_blocks_than_allowed_are_refused() -> None:
    register = Register(**ENDS, key=KEY, num_tokens=40, runs=(BlockRun(0, (1,)),), remaining_s=1.0)
    fields = msgspec.to_builtins(register) | {"runs": [[0, [1] * 65_537]]}
    with pytest.raises(ProtocolError, match="not valid"):
        decode(frame_of(fields))
    fields["runs"] = [[0, [1]]] * 65
    with pytest.raises(ProtocolError, match="not valid"):
        decode(frame_of(fields))


def test_I14_a_frame_beyond_the_size_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        decode(b"\xff" * (messages.MAX_MESSAGE_NBYTES + 1))


def test_the_largest_allowed_registration_fits_into_one_frame() -> None:
    run = BlockRun(0, tuple(range(2**31 - 65_536, 2**31)))
    register = Register(**ENDS, key=KEY, num_tokens=2**20, runs=(run,), remaining_s=1.0)
    assert decode(encode(register)) == register


def test_another_protocol_version_is_named_in_the_error() -> None:
    frame = bytearray(encode(DONE))
    frame[4] = 9
    with pytest.raises(ProtocolError, match="version 9 and this engine 1"):
        decode(bytes(frame))


@given(st.binary(max_size=64))
def test_I14_bytes_from_anyone_give_a_message_or_a_protocol_error(noise: bytes) -> None:
    for frame in (noise, b"PDKV\x01" + noise):
        with pytest.raises(ProtocolError):
            decode(frame)


@given(st.binary(max_size=4), st.integers(0, 60))
def test_I14_a_damaged_message_gives_a_message_or_a_protocol_error(noise: bytes, at: int) -> None:
    frame = bytearray(encode(DONE))
    frame[at : at + len(noise)] = noise
    try:
        message = decode(bytes(frame))
    except ProtocolError:
        return
    assert isinstance(message, messages.Message)


@pytest.mark.parametrize("seconds", [-1.0, 1e9, float("nan"), float("inf")])
def test_a_remaining_time_that_can_only_be_a_clock_reading_is_refused(seconds: float) -> None:
    renewed = Renewed(**ENDS, key=KEY, sequence=1, state=messages.LeaseState.LIVE, remaining_s=1.0)
    fields = msgspec.to_builtins(renewed) | {"remaining_s": seconds}
    with pytest.raises(ProtocolError, match="not valid"):
        decode(frame_of(fields))


def test_a_reference_survives_its_way_through_json() -> None:
    engine, blocks = EngineRef("P/1", 2), (BlockRun(0, (1, 2)),)
    reference = Reference(engine=engine, request_id="r", num_tokens=40, blocks=blocks, serial=1, valid_s=600, mac=MAC)
    assert Reference.from_params(msgspec.json.decode(msgspec.json.encode(reference.to_params()))) == reference


@pytest.mark.parametrize(
    "change", [{"extra": 1}, {"blocks": [[0, [-5]]]}, {"num_tokens": -1}, {"engine": "P/1"}, {"mac": "AA=="}]
)
def test_a_reference_that_others_have_changed_is_refused(change: dict[str, object]) -> None:
    reference = Reference(engine=EngineRef("P/1", 2), request_id="r", num_tokens=40, serial=1, valid_s=600.0, mac=MAC)
    with pytest.raises(ProtocolError, match="transfer parameters"):
        Reference.from_params(reference.to_params() | change)
