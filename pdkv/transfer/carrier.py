"""How messages between engines get from one to the other, as far as their users see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdkv.transfer.messages import AnyMessage, Message


class MessageCarrier(Protocol):
    """Carries messages to engines by engine id. It may lose, delay, repeat and reorder them, and never waits.

    What it returns is valid and comes from the engine that the message's `sender` names; everything else was counted
    and dropped. A REFUSE comes only from where the engine that was meant is, or was.
    :class:`pdkv.transfer.sidechannel.SideChannel` carries them between processes and machines.
    """

    def send(self, message: Message) -> bool:
        """Take a message for ``message.receiver``. False: dropped at once, and counted.

        Raises:
            ProtocolError: it is larger than a peer accepts.
            StateError: closed, or made by the process that this one was forked from.
        """

    def receive(self) -> tuple[AnyMessage, ...]:
        """What has arrived, perhaps not all of it at once; empty where nothing has.

        Raises:
            StateError: closed, or its parent's, as above.
        """

    def fileno(self) -> int:
        """Readable while there is something to receive: for ``select``, ``poll`` and event loops."""

    def call_on_arrival(self, handler: Callable[[], bool]) -> None:
        """Have messages taken by the thread that brings them: it calls `handler`, which receives and may send.

        That saves waking another one. `handler` must not wait or raise; it says whether it has taken what there was,
        and where it has not, :meth:`fileno` is readable as without it. A carrier without a thread never calls it.

        Raises:
            StateError: closed.
        """

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Let go of everything. Idempotent."""
