"""I14: whatever comes over an ipc or UCX connection, as a notification of NIXL, or in a description, is understood or
refused."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ProtocolError
from pdkv.transfer.geometry import CacheGeometry
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.auto.description import Description
from pdkv_connectors.checking import wire as sums
from pdkv_connectors.ipc import wire as ipc
from pdkv_connectors.nixl import notes
from pdkv_connectors.nixl import transport as nixl
from pdkv_connectors.ucx import transport as ucx
from pdkv_connectors.ucx import wire as ucx_wire

pytestmark = pytest.mark.cpu

counts = st.integers(0, 2**53)
names = st.text(min_size=1, max_size=256)
texts = st.text(max_size=512)
digests = st.binary(min_size=32, max_size=32)
engines = st.builds(EngineRef, names, counts)
ids = st.integers(0, 2**31 - 1)
numbers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda found: np.array(found, "<i8").tobytes())
pieces = st.lists(st.tuples(counts, counts), max_size=4).map(tuple)

IPC: dict[type, st.SearchStrategy[Any]] = {
    ipc.Hello: st.builds(ipc.Hello, counts, digests, engines, engines),
    ipc.Grant: st.builds(ipc.Grant, st.integers(0, 2), counts, pieces, st.booleans()),
    ipc.Refuse: st.builds(ipc.Refuse, texts),
    ipc.Offer: st.builds(ipc.Offer, counts, ids, st.lists(ids, min_size=1, max_size=9).map(tuple)),
    ipc.Offered: st.builds(ipc.Offered, counts, texts),
    ipc.Drop: st.builds(ipc.Drop),
    ipc.Dropped: st.builds(ipc.Dropped),
}
UCX: dict[type, st.SearchStrategy[Any]] = {
    ucx_wire.Hello: st.builds(ucx_wire.Hello, digests),
    ucx_wire.Ask: st.builds(ucx_wire.Ask, counts, engines, st.booleans(), numbers, numbers),
    ucx_wire.Go: st.builds(ucx_wire.Go, counts),
    ucx_wire.No: st.builds(ucx_wire.No, counts, texts),
    ucx_wire.End: st.builds(ucx_wire.End, counts),
    ucx_wire.Question: st.builds(ucx_wire.Question, counts, st.binary(max_size=99)),
    ucx_wire.Answer: st.builds(ucx_wire.Answer, counts, st.binary(max_size=99)),
    ucx_wire.Bye: st.builds(ucx_wire.Bye, texts),
}
READERS: dict[str, Callable[[bytes], object]] = {
    "auto": Description.decode,
    "nixl": nixl.read_own,
    "ucx": ucx.read_own,
    "ipc": ipc.read_address,
    "geometry": CacheGeometry.decode,
    "ucx control": ucx_wire.decode_control,
    "questions about sums": sums.decode_question,
    "answers with sums": sums.decode_answer,
    "notifications": notes.read_note,
}
HONEST = [
    msgspec.msgpack.encode(found)
    for found in (
        sums.Wanted(EngineRef("P", 1), 0, bytes(8)),
        sums.Compare(EngineRef("D", 1), 0, bytes(4), bytes(24)),
        sums.Sums(bytes(24)),
        notes.Question(3, b"body", b"metadata"),
        notes.Answer(3, b"body"),
        Description("host", {"ipc": b"x"}),
        nixl._Own("agent", b"metadata"),
        ucx._Own("127.0.0.1", 5000, bytes(32)),
        ipc.Address(ipc.VERSION, "machine", "name", bytes(32), True),
    )
]


def through_a_socket(packet: bytes) -> ipc.Message | None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(5)
        theirs.send(packet)
        received = ipc.receive(ours)
        return None if received is None else received[0]


def test_every_message_of_ipc_and_ucx_is_fuzzed() -> None:
    assert set(IPC) == set(ipc.Message.__args__)
    assert set(UCX) == set(ucx_wire.Control.__args__)


@pytest.mark.parametrize("kind", IPC, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_I14_every_ipc_message_comes_back_as_it_was_and_damaged_ones_are_refused(
    kind: type, data: st.DataObject
) -> None:
    message = data.draw(IPC[kind])
    packet = ipc._encoder.encode(message)
    if not isinstance(message, ipc.Grant) or not message.pieces:  # its descriptors do not come along here
        assert through_a_socket(packet) == message
    try:
        through_a_socket(damaged(packet, data))
    except ProtocolError:
        return


@pytest.mark.parametrize("kind", UCX, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_I14_every_ucx_message_comes_back_as_it_was_and_damaged_ones_are_refused(
    kind: type, data: st.DataObject
) -> None:
    message = data.draw(UCX[kind])
    header, body = ucx_wire.encode_control(message)
    assert ucx_wire.body_nbytes(header, ucx_wire.MAX_CONTROL_NBYTES) == len(body)
    assert ucx_wire.decode_control(body) == message
    try:
        ucx_wire.body_nbytes(damaged(header, data), ucx_wire.MAX_CONTROL_NBYTES)
        again = ucx_wire.decode_control(damaged(body, data))
        if isinstance(again, ucx_wire.Ask):
            offsets, nbytes = ucx_wire.arrays_of(again)
            assert (offsets >= 0).all()
            assert (nbytes > 0).all()
    except ProtocolError:
        return


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_I14_any_description_of_a_transport_is_understood_or_refused(name: str, data: st.DataObject) -> None:
    kinds = st.one_of(st.binary(max_size=200), st.sampled_from(HONEST).map(lambda frame: damaged(frame, data)))
    try:
        READERS[name](data.draw(kinds))
    except ProtocolError:
        return


@pytest.mark.parametrize("name", READERS)
def test_I14_a_description_that_is_nested_without_end_is_refused(name: str) -> None:
    for depth in (100, 100_000):
        for frame in (b"\x91" * depth, b"\x92\xa1x" + b"\x91" * depth, b"\x93\xa1x\xc4\x01x" + b"\x91" * depth):
            with pytest.raises(ProtocolError):
                READERS[name](frame)


def damaged(frame: bytes, data: st.DataObject) -> bytes:
    changed = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed)))
        changed[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    return bytes(changed)
