"""The two queues between the thread that uses a side channel and the thread that runs it. Both are bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

from pdkv.transfer.messages import AnyMessage
from pdkv.transfer.signals import Signal


class Inbox:
    """Messages that have arrived, by sender. Each sender has room of its own, and its turn: who floods fills only his.

    Args:
        max_messages, max_nbytes: of one sender.
    """

    def __init__(self, max_messages: int, max_nbytes: int) -> None:
        self.signal = Signal()
        self._max_messages = max_messages
        self._max_nbytes = max_nbytes
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, deque[tuple[AnyMessage, int]]] = OrderedDict()
        self._nbytes: dict[str, int] = {}

    def has_room(self, sender: str, nbytes: int) -> bool:
        """Whether a message of this size would be taken: asked before it is decoded."""
        with self._lock:
            queue = self._queues.get(sender, ())
            return len(queue) < self._max_messages and self._nbytes.get(sender, 0) + nbytes <= self._max_nbytes

    def put(self, sender: str, message: AnyMessage, nbytes: int) -> None:
        """For the thread that runs the side channel, which then sees to it that somebody takes the message."""
        with self._lock:
            self._queues.setdefault(sender, deque()).append((message, nbytes))
            self._nbytes[sender] = self._nbytes.get(sender, 0) + nbytes

    def announce(self) -> None:
        """Set the signal, where there are messages."""
        with self._lock:
            if self._queues:
                self.signal.set()

    def take(self, most: int) -> tuple[AnyMessage, ...]:
        """Up to `most` messages, one sender after the other. For the thread that uses the side channel."""
        taken: list[AnyMessage] = []
        with self._lock:
            while self._queues and len(taken) < most:
                sender, queue = self._queues.popitem(last=False)
                message, nbytes = queue.popleft()
                taken.append(message)
                if queue:
                    self._queues[sender] = queue
                    self._nbytes[sender] -= nbytes
                else:
                    del self._nbytes[sender]
            if not self._queues:
                self.signal.clear()
        return tuple(taken)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(queue) for queue in self._queues.values())


class Outgoing:
    """Frames to be sent, in order, with the engine that each is for."""

    def __init__(self, max_messages: int, max_nbytes: int) -> None:
        self.signal = Signal()
        self._max_messages = max_messages
        self._max_nbytes = max_nbytes
        self._lock = threading.Lock()
        self._frames: deque[tuple[str, bytes]] = deque()
        self._nbytes = 0

    def put(self, engine_id: str, frame: bytes) -> bool:
        """False where there is no room, or nobody takes them any more."""
        with self._lock:
            if len(self._frames) >= self._max_messages or self._nbytes + len(frame) > self._max_nbytes:
                return False
            if not self.signal.set():
                return False
            self._frames.append((engine_id, frame))
            self._nbytes += len(frame)
        return True

    def take_all(self) -> tuple[tuple[str, bytes], ...]:
        with self._lock:  # also to see that there are none: one may have been announced and not be here yet
            if not self._frames:
                return ()
            frames, self._nbytes = tuple(self._frames), 0
            self._frames.clear()
            self.signal.clear()
        return frames
