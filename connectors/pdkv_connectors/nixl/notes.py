"""Questions and answers between NIXL agents, as notifications: what travels beside the one-sided transfers.

Who asks may be somebody whom this side has never connected to, since only who posts transfers connects. So a question
brings what it takes to answer, the asker's connection in NIXL's own form.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Annotated, Any
from weakref import WeakValueDictionary

import msgspec

from pdkv.errors import ProtocolError, TransportError
from pdkv.transfer.messages import Count
from pdkv.transfer.unpacking import unpack
from pdkv_connectors.nixl.agent import translated

logger = logging.getLogger(__name__)

MAGIC = b"PDKVN1"
"""Begins a notification of this kind; others are none of ours."""

MAX_BODY_NBYTES = 1 << 20
MAX_QUESTIONS = 64
"""Of one peer that are not answered yet; further ones are dropped, and asked again by who wants them."""

MAX_ASKERS = 256
"""Whom this side is not connected to and can answer. The one that was silent for the longest is forgotten first."""

REPEAT_S = 1.0
"""A question is sent again after so long: an agent that has gone shows by that, as NIXL reports no loss."""

SERVE_S = 5e-3
"""So long one call answers peers, in steps of a few milliseconds; the rest is for the next call."""

_Body = Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_NBYTES)]


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="Q"):
    """`reply_to`: the asker's connection, as NIXL describes it."""

    number: Count
    body: _Body
    reply_to: Annotated[bytes, msgspec.Meta(max_length=65_536)]


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="A"):
    number: Count
    body: _Body


_decoder = msgspec.msgpack.Decoder(Question | Answer)


def read_note(data: bytes) -> Question | Answer:
    """What follows `MAGIC`. Raises ProtocolError where it is not valid."""
    return unpack(_decoder, data, "a notification about sums")


Serve = Callable[[bytes], Generator[None, None, bytes]]
"""Makes the answer to a question, in steps."""


class Notes:
    """Of one agent. Nothing happens but in calls.

    Args:
        connected: names of the agents that the transport itself keeps.
    """

    def __init__(self, agent: Any, serve: Serve, connected: Callable[[], Iterable[str]]) -> None:
        self._agent: Any = agent
        self._serve = serve
        self._connected = connected
        with translated("describe its connection"):
            nothing = agent.get_reg_descs([(0, 1, 0, "")], "DRAM")
            nothing.clear()
            self._reply_to = agent.get_partial_agent_metadata(nothing, inc_conn_info=True, backends=["UCX"])
        self._number = 0
        self._asked: WeakValueDictionary[int, NoteAsked] = WeakValueDictionary()  # by number
        self._jobs: OrderedDict[tuple[str, int], tuple[bytes, Generator[None, None, bytes]]] = OrderedDict()
        self._askers: OrderedDict[str, None] = OrderedDict()

    def ask(self, agent: str, body: bytes) -> NoteAsked:
        """Send a question. Raises TransportError where the agent has gone."""
        self._number += 1
        frame = MAGIC + msgspec.msgpack.encode(Question(self._number, body, self._reply_to))
        self.send(agent, frame)
        asked = self._asked[self._number] = NoteAsked(self, agent, frame)
        return asked

    def take(self, notifications: Mapping[Any, Iterable[bytes]]) -> None:
        """What NIXL has received, by the name of the agent that sent it."""
        for sender, frames in notifications.items():
            name = sender.decode(errors="replace") if isinstance(sender, bytes) else str(sender)
            for frame in frames:
                if frame.startswith(MAGIC):
                    self._take_one(name, frame[len(MAGIC) :])

    def work(self) -> None:
        """Go on answering, each peer a step at a time."""
        end = time.monotonic() + SERVE_S
        while self._jobs and time.monotonic() < end:
            key, (reply_to, steps) = self._jobs.popitem(last=False)
            try:
                next(steps)
            except StopIteration as done:
                self._reply(*key, reply_to, done.value)
            else:
                self._jobs[key] = reply_to, steps

    def close(self) -> None:
        """Let go of the agent, which nobody may hold any more when it is destroyed; not even who still asks."""
        self._agent = None
        self._jobs.clear()
        self._askers.clear()

    def send(self, agent: str, frame: bytes) -> None:
        """Raises TransportError where NIXL does not know the agent, or knows that it has gone."""
        if self._agent is None:
            raise TransportError("the NIXL agent is gone; register() again.")
        with translated("send a notification"):
            self._agent.send_notif(agent, frame)

    def _take_one(self, sender: str, data: bytes) -> None:
        try:
            note = read_note(data)
        except ProtocolError as error:
            logger.warning("The NIXL agent %r: %s", sender, error)
            return
        if isinstance(note, Answer):
            if (asked := self._asked.get(note.number)) is not None and asked.agent == sender:
                asked.body = note.body
            return
        is_new = (sender, note.number) not in self._jobs  # else it was repeated before it was answered
        if is_new and sum(agent == sender for agent, _ in self._jobs) < MAX_QUESTIONS:
            self._jobs[sender, note.number] = note.reply_to, self._serve(note.body)

    def _reply(self, agent: str, number: int, reply_to: bytes, body: bytes) -> None:
        try:
            self._meet(agent, reply_to)
            self.send(agent, MAGIC + msgspec.msgpack.encode(Answer(number, body)))
        except TransportError as error:
            logger.info("The NIXL agent %r did not hear the answer to its question: %s", agent, error)

    def _meet(self, agent: str, reply_to: bytes) -> None:
        if agent in self._connected():
            return
        with translated("add an agent that asked"):
            found = self._agent.add_remote_agent(reply_to)
        if (found.decode(errors="replace") if isinstance(found, bytes) else found) != agent:
            raise TransportError(f"it gave the connection of the agent {found!r}.")
        self._askers[agent] = None
        self._askers.move_to_end(agent)
        if len(self._askers) > MAX_ASKERS:
            self._drop(self._askers.popitem(last=False)[0])

    def _drop(self, agent: str) -> None:
        if agent not in self._connected():
            try:
                with translated("remove an agent that asked"):
                    self._agent.remove_remote_agent(agent)
            except TransportError as error:
                logger.info("%s It may have gone already.", error)


class NoteAsked:
    """A question that was sent; repeated until it is answered."""

    def __init__(self, notes: Notes, agent: str, frame: bytes) -> None:
        self.agent = agent
        self.body: bytes | None = None
        self._notes, self._frame = notes, frame
        self._repeat_at = time.monotonic() + REPEAT_S

    def answer(self) -> bytes | None:
        """None while there is none. Raises TransportError where the agent has gone."""
        if self.body is None and time.monotonic() > self._repeat_at:
            self._repeat_at += REPEAT_S
            self._notes.send(self.agent, self._frame)
        return self.body
