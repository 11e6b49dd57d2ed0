"""A message carrier between engines of one process, for tests and for engines that share one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from pdkv.errors import StateError
from pdkv.transfer.messages import AnyMessage, Message, decode, encode
from pdkv.transfer.signals import Signal


class InprocNetwork:
    """Carriers that reach each other by engine id. `dropped` counts messages to engines that are not there."""

    def __init__(self) -> None:
        self.dropped = 0
        self._carriers: dict[str, InprocCarrier] = {}

    def carrier(self, engine_id: str) -> InprocCarrier:
        """The carrier of this engine; takes the place of one that was closed."""
        made = self._carriers[engine_id] = InprocCarrier(self, engine_id)
        return made

    def find(self, engine_id: str) -> InprocCarrier | None:
        """The open carrier of an engine."""
        return self._carriers.get(engine_id)

    def leave(self, carrier: InprocCarrier) -> None:
        """Called by a carrier that closes."""
        if self._carriers.get(carrier.engine_id) is carrier:
            del self._carriers[carrier.engine_id]


class InprocCarrier:
    """A :class:`pdkv.transfer.carrier.MessageCarrier`. Messages pass through their frames, as between processes."""

    def __init__(self, network: InprocNetwork, engine_id: str) -> None:
        self.engine_id = engine_id
        self._network = network
        self._frames: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._signal = Signal()
        self._closed = False

    def send(self, message: Message) -> bool:
        self._require_open()
        frame, receiver = encode(message), self._network.find(message.receiver.engine_id)
        if receiver is None or not receiver.deliver(frame):
            self._network.dropped += 1
            return False
        return True

    def deliver(self, frame: bytes) -> bool:
        """Take a frame from another carrier; False where this one is closed."""
        with self._lock:
            if self._closed:
                return False
            self._frames.append(frame)
            self._signal.set()
        return True

    def receive(self) -> tuple[AnyMessage, ...]:
        self._require_open()
        with self._lock:
            frames, self._frames = self._frames, deque()
            self._signal.clear()
        return tuple(decode(frame) for frame in frames)

    def fileno(self) -> int:
        return self._signal.fileno()

    def call_on_arrival(self, handler: Callable[[], bool]) -> None:
        """Never: there is no thread here, and who sends is in the middle of work of its own."""
        self._require_open()

    def close(self, *, timeout_s: float = 2.0) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._signal.close()
        self._network.leave(self)

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"the message carrier of engine {self.engine_id!r} is closed; make a new one.")
