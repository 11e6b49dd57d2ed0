"""I14: what two sides say about sums comes back as it was, and any other bytes are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.errors import ProtocolError
from pdkv.transfer.messages import EngineRef
from pdkv_connectors.checking import wire

pytestmark = pytest.mark.cpu

BLOCKS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20).map(lambda ids: np.array(ids, np.int32))
ENGINES = st.builds(EngineRef, st.text(min_size=1, max_size=20), st.integers(0, 2**40))
IDS = BLOCKS.map(wire.write_ids)
SUMS = st.integers(0, 9).flatmap(lambda count: st.binary(min_size=8 * count, max_size=8 * count))
QUESTIONS = st.one_of(
    st.builds(wire.Wanted, ENGINES, st.integers(0, 63), IDS),
    st.builds(wire.Compare, ENGINES, st.integers(0, 63), IDS, SUMS, st.booleans()),
)
ANSWERS = st.one_of(
    st.builds(wire.Sums, SUMS),
    st.builds(wire.Compared, st.integers(-1, wire.MAX_BLOCKS - 1)),
    st.builds(wire.Refused, st.text(max_size=512)),
)


@given(QUESTIONS, ANSWERS)
def test_I14_every_question_and_answer_comes_back_as_it_was_and_neither_is_taken_for_the_other(
    question: wire.Question, answer: wire.Answer
) -> None:
    assert wire.decode_question(wire.encode(question)) == question
    assert wire.decode_answer(wire.encode(answer)) == answer
    with pytest.raises(ProtocolError):
        wire.decode_answer(wire.encode(question))
    with pytest.raises(ProtocolError):
        wire.decode_question(wire.encode(answer))


@settings(max_examples=300)
@given(
    st.binary(max_size=200) | QUESTIONS.map(wire.encode).flatmap(lambda body: st.binary(max_size=9).map(body.__add__))
)
def test_I14_other_bytes_are_refused_by_one_error(body: bytes) -> None:
    for decode in (wire.decode_question, wire.decode_answer):
        try:
            decode(body)
        except ProtocolError:
            continue


@given(BLOCKS, st.integers(1, 4), st.data())
def test_numbers_come_back_as_they_were(blocks: wire.Blocks, layers: int, data: st.DataObject) -> None:
    assert (wire.read_ids(wire.write_ids(blocks)) == blocks).all()
    numbers = st.integers(0, 2**64 - 1)
    sums = np.array(data.draw(st.lists(numbers, min_size=layers, max_size=layers)), np.uint64).reshape(1, layers)
    assert (wire.read_sums(wire.write_sums(sums), 1, layers) == sums).all()


def test_I14_lists_of_wrong_lengths_and_bodies_that_are_too_long_are_refused() -> None:
    with pytest.raises(ProtocolError, match="no list of block ids"):
        wire.read_ids(b"12345")
    with pytest.raises(ProtocolError, match="negative"):
        wire.read_ids(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="16 bytes of sums came for 1 blocks of 3 layers"):
        wire.read_sums(bytes(16), 1, 3)
    with pytest.raises(ProtocolError, match="are the most"):
        wire.decode_answer(bytes(wire.MAX_BODY_NBYTES + 1))
    with pytest.raises(ProtocolError, match="not valid"):
        wire.decode_question(wire.encode(wire.Wanted(EngineRef("P", 1), 0, b"")))
