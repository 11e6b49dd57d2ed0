"""A transfer that is done only when what has arrived is what was summed.

READ: ask the owner for the sums of its blocks, move them, hash what has arrived, compare. WRITE: sum the own blocks,
move them, have the receiver compare.

Where something differs, the side that has the blocks is asked once more. The same sums again mean that it has not
written the blocks since, so that the bytes were damaged: ``checksum_failures`` counts that. Other sums mean that the
blocks were written again under the transfer, which fails it too, but is no damage: ``rewritten`` counts that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pdkv.errors import PdkvError, ProtocolError, TransferTimeoutError, TransportError
from pdkv.transfer.base import PostedTransfer, TransportBase
from pdkv.transfer.blocks import BlockPair
from pdkv.transfer.checks import Connection
from pdkv.transfer.clock import Clock, SystemClock
from pdkv.transfer.transport import TransferState
from pdkv_connectors.checking import wire
from pdkv_connectors.checking.keeper import Steps, SumKeeper, blocks_of_question, first_difference

ANSWER_TIMEOUT_S = 20.0
"""How long a peer has for an answer. It may have to sum first, and to end a step of its engine before."""

ASKED_AT_ONCE = 4


class Asked(Protocol):
    """A question that was sent."""

    def answer(self) -> bytes | None:
        """None while there is none. Raises TransportError where none will come."""


@dataclass(frozen=True, slots=True)
class Part:
    """Pairs of one KV-cache group, as many as one question may name."""

    group: int
    source: wire.Blocks
    destination: wire.Blocks

    def only(self, place: int) -> Part:
        """One of its pairs."""
        return Part(self.group, self.source[place : place + 1], self.destination[place : place + 1])


class CheckedTransfer(PostedTransfer):
    """See the module's docstring.

    Args:
        keeper: this side's sums.
        ask: sends a question to the peer.
        move: posts the transfer of bytes.
    """

    def __init__(
        self,
        transport: TransportBase[Any],
        connection: Connection[Any],
        pairs: Sequence[BlockPair],
        *,
        reads: bool,
        keeper: SumKeeper,
        ask: Callable[[bytes], Asked],
        move: Callable[[], PostedTransfer],
        clock: Clock | None = None,
    ) -> None:
        parts = list(parts_of(pairs, keeper))
        super().__init__(
            transport, connection, sum(keeper.geometry.block_nbytes(part.group) * len(part.source) for part in parts)
        )
        #: What moves the bytes, while it does.
        self.inner: PostedTransfer | None = None
        self._keeper, self._ask, self._move = keeper, ask, move
        self._clock = clock or SystemClock()
        self._abandoned = False
        self._computes = False
        self._steps = self._read(parts) if reads else self._write(parts)

    @property
    def moves_in_poll(self) -> bool:
        return self._computes or (self.inner is not None and self.inner.moves_in_poll)

    def abandon(self) -> bool:
        self._abandoned = True
        return self.end_abandoned() if self.inner is None else super().abandon()

    def _look(self) -> TransferState:
        try:
            next(self._steps)
        except StopIteration:
            return TransferState.DONE
        except PdkvError as error:
            self.reason = str(error)
            return TransferState.FAILED
        return TransferState.RUNNING

    # The two ways.

    def _read(self, parts: Sequence[Part]) -> Iterator[None]:
        expected = yield from self._sums_of_peer(parts)
        yield from self._moved()
        for part, sums in zip(parts, expected, strict=True):
            found = yield from self._computed(self._keeper.arrived(part.group, part.destination))
            if (wrong := first_difference(sums, found)) is not None:
                (again,) = yield from self._sums_of_peer([part.only(wrong)])
                raise self._judged(part, wrong, sums, again)

    def _write(self, parts: Sequence[Part]) -> Iterator[None]:
        expected = []
        for part in parts:
            expected.append((yield from self._computed(self._keeper.own(part.group, part.source))))
        yield from self._moved()
        compared = yield from self._answers([self._compare(*both) for both in zip(parts, expected, strict=True)])
        for part, sums, answer in zip(parts, expected, compared, strict=True):
            if not isinstance(answer, wire.Compared) or answer.wrong >= len(part.source):
                raise ProtocolError("the peer did not say how the blocks that it was to compare have arrived.")
            if (wrong := answer.wrong) >= 0:
                again = yield from self._computed(self._keeper.own(part.group, part.only(wrong).source))
                if (sums[wrong] == again).all():
                    yield from self._answers([self._compare(part.only(wrong), again, is_final=True)])
                raise self._judged(part, wrong, sums, again)

    def _judged(self, part: Part, wrong: int, sums: wire.SumArray, again: wire.SumArray) -> TransportError:
        block = int(part.source[wrong])
        if (sums[wrong] == again).all():
            self._transport.counts["checksum_failures"] += 1
            return TransportError(f"the bytes of block {block} are not those that its owner summed.")
        self._transport.counts["rewritten"] += 1
        return TransportError(f"block {block} was written again by its owner while it was being transferred.")

    # Parts of them.

    def _moved(self) -> Iterator[None]:
        """Until all bytes are at their destination."""
        inner = self.inner = self._move()
        while (state := inner.look()) is TransferState.RUNNING:
            yield
        self.inner = None
        if state is TransferState.FAILED:
            raise TransportError(inner.reason)
        if self._abandoned:
            raise TransportError("it was abandoned")

    def _computed(self, steps: Steps[wire.SumArray]) -> Steps[wire.SumArray]:
        self._computes = True
        found = yield from steps
        self._computes = False
        return found

    def _sums_of_peer(self, parts: Sequence[Part]) -> Steps[list[wire.SumArray]]:
        owner = self.connection.peer
        questions = [wire.encode(wire.Wanted(owner, part.group, wire.write_ids(part.source))) for part in parts]
        answers = yield from self._answers(questions)
        found = []
        for part, answer in zip(parts, answers, strict=True):
            if not isinstance(answer, wire.Sums):
                raise ProtocolError("the peer did not answer with the sums that it was asked for.")
            found.append(wire.read_sums(answer.sums, len(part.source), self._keeper.layers_of(part.group)))
        return found

    def _compare(self, part: Part, sums: wire.SumArray, *, is_final: bool = False) -> bytes:
        blocks, data = wire.write_ids(part.destination), wire.write_sums(sums)
        return wire.encode(wire.Compare(self.connection.peer, part.group, blocks, data, is_final))

    def _answers(self, questions: Sequence[bytes]) -> Steps[list[wire.Answer]]:
        """Ask, a few at a time."""
        found: list[wire.Answer] = []
        left, waiting = deque(questions), deque[Asked]()
        while left or waiting:
            while left and len(waiting) < ASKED_AT_ONCE:
                waiting.append(self._ask(left.popleft()))
            answer = wire.decode_answer((yield from self._awaited(waiting.popleft())))
            if isinstance(answer, wire.Refused):
                raise TransportError(f"the peer does not check the transfer: {answer.reason.rstrip('.')}.")
            found.append(answer)
        return found

    def _awaited(self, asked: Asked) -> Steps[bytes]:
        deadline = self._clock.monotonic() + ANSWER_TIMEOUT_S
        while (body := asked.answer()) is None:
            if self._clock.monotonic() > deadline:
                raise TransferTimeoutError(
                    f"the peer has not answered for {ANSWER_TIMEOUT_S:g} s what its blocks hash to; see whether its "
                    "engine runs."
                )
            yield
        return body


def parts_of(pairs: Sequence[BlockPair], keeper: SumKeeper) -> Iterator[Part]:
    """The pairs of each KV-cache group, cut into what one question may name."""
    table = np.array(pairs, np.int32).reshape(-1, 3)
    for group in np.unique(table[:, 0]).tolist():
        rows = table[table[:, 0] == group]
        step = blocks_of_question(keeper.layers_of(group))
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            yield Part(group, part[:, 1].copy(), part[:, 2].copy())


def moving(transfer: PostedTransfer) -> PostedTransfer | None:
    """What of a transfer moves bytes now."""
    return transfer.inner if isinstance(transfer, CheckedTransfer) else transfer
