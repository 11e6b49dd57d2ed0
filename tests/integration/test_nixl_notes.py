"""Questions between real NIXL agents, beside transfers: who asks, who answers, and what is none of theirs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from pdkv.errors import TransportError
from pdkv.testing.transports.side import TransportSide

pytest.importorskip("nixl", reason="NIXL is not installed; make test installs it")

from pdkv_connectors.nixl import notes as nixl_notes
from pdkv_connectors.nixl.agent import destroy_agent, make_agent
from pdkv_connectors.nixl.notes import MAGIC, MAX_QUESTIONS, NoteAsked, Notes
from pdkv_connectors.nixl.transport import NixlTransport

pytestmark = pytest.mark.nixl

DEADLINE_S = 30.0


class Party:
    """An agent with its notes; it answers a question by itself in capitals, after `steps` steps."""

    def __init__(self, name: str, steps: int = 1) -> None:
        self.agent: Any = make_agent(name, {})
        self.connected: list[str] = []
        self.steps = steps
        self.served: list[bytes] = []
        self.notes = Notes(self.agent, self._serve, lambda: self.connected)

    def _serve(self, body: bytes) -> Generator[None, None, bytes]:
        self.served.append(body)
        for _ in range(self.steps):
            yield
        return body.upper()

    def meet(self, other: Party) -> None:
        self.agent.add_remote_agent(other.agent.get_agent_metadata())
        self.connected.append(other.agent.name)

    def receive(self) -> None:
        self.notes.take(self.agent.get_new_notifs())

    def turn(self) -> None:
        self.receive()
        self.notes.work()


@pytest.fixture
def parties() -> Iterator[tuple[Party, Party]]:
    """P, whom D knows, and D, whom P does not."""
    p, d = Party("P"), Party("D")
    d.meet(p)
    yield p, d
    for party in (d, p):
        party.notes = None  # type: ignore[assignment]
        holder, party.agent = [party.agent], None
        destroy_agent(holder)


def answer_of(asked: NoteAsked, *turns: Callable[[], None]) -> bytes:
    deadline = time.monotonic() + DEADLINE_S
    while (body := asked.answer()) is None:
        for turn in turns:
            turn()
        assert time.monotonic() < deadline
    return body


def test_who_asks_is_answered_though_nobody_has_told_the_other_agent_of_it(parties: tuple[Party, Party]) -> None:
    p, d = parties
    asked = [d.notes.ask(p.agent.name, body) for body in (b"a", b"b" * 500_000, b"c")]
    assert [answer_of(one, p.turn, d.receive)[:2] for one in asked] == [b"A", b"BB", b"C"]


def test_a_question_that_was_repeated_is_answered_once(
    parties: tuple[Party, Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = parties
    monkeypatch.setattr(nixl_notes, "REPEAT_S", 0.0)
    asked = d.notes.ask(p.agent.name, b"a")
    for _ in range(10):
        assert asked.answer() is None
    asked._repeat_at = float("inf")
    last = d.notes.ask(p.agent.name, b"z")
    last._repeat_at = float("inf")
    deadline = time.monotonic() + DEADLINE_S
    while len(p.notes._jobs) < 2:
        p.receive()
        d.receive()
        assert time.monotonic() < deadline
    assert [answer_of(one, p.turn, d.receive) for one in (asked, last)] == [b"A", b"Z"]
    assert p.served == [b"a", b"z"]


def test_an_agent_that_has_gone_shows_by_the_repeated_question(
    parties: tuple[Party, Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = parties
    monkeypatch.setattr(nixl_notes, "REPEAT_S", 0.01)
    assert answer_of(d.notes.ask(p.agent.name, b"a"), p.turn, d.receive) == b"A"
    name = p.agent.name
    p.agent = p.notes = None  # type: ignore[assignment]
    with pytest.raises(TransportError, match="could not send a notification"):
        answer_of(d.notes.ask(name, b"b"), d.receive, lambda: time.sleep(0.01))


def test_what_is_none_of_theirs_or_not_valid_is_left_alone(
    parties: tuple[Party, Party], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = parties
    for frame in (b"something of vLLM's", MAGIC, MAGIC + b"\xc1", MAGIC + msgspec.msgpack.encode({"type": "A"})):
        d.notes.send(p.agent.name, frame)
    assert answer_of(d.notes.ask(p.agent.name, b"a"), p.turn, d.receive) == b"A"
    assert p.served == [b"a"]
    assert caplog.text.count("is not valid") == 3


def test_an_answer_counts_only_from_the_agent_that_was_asked(parties: tuple[Party, Party]) -> None:
    p, d = parties
    other = Party("Q")
    other.meet(d)
    asked = d.notes.ask(p.agent.name, b"a")
    other.notes.send(d.agent.name, MAGIC + msgspec.msgpack.encode({"type": "A", "number": 1, "body": b"forged"}))
    for _ in range(200):
        d.receive()
        other.receive()
        assert asked.answer() is None
    assert answer_of(asked, p.turn, d.receive) == b"A"


def test_one_peer_cannot_fill_the_table_of_another(
    parties: tuple[Party, Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = parties
    asked = [d.notes.ask(p.agent.name, b"a") for _ in range(MAX_QUESTIONS + 20)]
    deadline = time.monotonic() + DEADLINE_S
    while len(p.notes._jobs) < MAX_QUESTIONS:
        p.receive()
        d.receive()
        assert time.monotonic() < deadline
    for _ in range(100):
        p.receive()
    assert len(p.notes._jobs) == MAX_QUESTIONS
    monkeypatch.setattr(nixl_notes, "REPEAT_S", 0.01)
    assert {answer_of(one, p.turn, d.receive) for one in asked} == {b"A"}, "what was dropped is asked again"


def test_askers_are_forgotten_from_the_oldest_on_and_are_answered_when_they_ask_again(
    parties: tuple[Party, Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = parties
    monkeypatch.setattr(nixl_notes, "MAX_ASKERS", 1)
    other = Party("Q")
    other.meet(p)
    for _ in range(2):
        for asker in (d, other):
            assert answer_of(asker.notes.ask(p.agent.name, b"a"), p.turn, asker.receive) == b"A"
            assert list(p.notes._askers) == [asker.agent.name]


def test_I11_an_agent_is_destroyed_under_a_transfer_that_still_asks() -> None:
    """Only its end stops what moves, so nothing that asks may keep it."""
    p, d = (TransportSide(partial(NixlTransport, verify=True)) for _ in range(2))
    for name, side in (("P", p), ("D", d)):
        side.do_open()
        side.do_build(1536)
        side.do_register(name, 1)
    d.do_connect("P", 1, p.do_describe())
    number = d.do_post("P", 1, [[0, 1, 2]], reads=True)
    assert d.do_poll(number) == "running"
    assert isinstance(d.transport, NixlTransport)
    agent = weakref.ref(d.transport.agent)
    assert agent() is not None
    d.do_close()
    assert agent() is None
    assert d.do_poll(number) == "failed"
    for side in (p, d):
        side.do_finish()
