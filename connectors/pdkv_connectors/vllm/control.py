"""The side channel on which pdkv's engines tell each other how requests end: ZeroMQ, one thread that owns all sockets.

Why not NIXL's notifications: they move only while both sides poll their agents, and an idle engine would have to poll
all the time; they are gone while an agent is being rebuilt or its engine asleep, just when a peer must be answered; and
prefill would have to load the metadata of each decode engine only to answer it.

Prefill listens (ROUTER) on a port of the system's choice beside vLLM's own side channel; decode connects (DEALER),
named by its engine id, and is answered over the same connection. Messages may be lost, as `pdkv.transfer` expects.

The connection is encrypted (CurveZMQ). Prefill's key is made at its start and published with its address, so that
decode hears only whom its reference came from. Who decode is, its claims say: they come of references of prefill's.
Why this is not `pdkv.transfer.sidechannel`: docs/architecture.md, "Sessions".
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdkv.errors import TransportError
from pdkv.transfer.messages import MAX_MESSAGE_NBYTES

logger = logging.getLogger(f"vllm.{__name__}")

#: Seconds that a connection may be down before its peer counts as lost; and that an unused one is kept.
LOST_AFTER_S = 2.0
UNUSED_AFTER_S = 600.0
AFTER_FAILURE_S = 0.5
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_MAX_FRAMES = 256  # of one socket in one round, so that one peer cannot keep the others waiting


@dataclass
class _Dialled:
    """One connection to a prefill engine."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    used_at: float
    down_since: float | None = None
    engines: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Arrived:
    """What came in one round.

    Attributes:
        for_prefill, for_decode: frames.
        lost: engine ids whose connection has been down for too long.
    """

    for_prefill: list[bytes]
    for_decode: list[bytes]
    lost: list[str]


class ControlChannel:
    """Args:
    host: where to listen; None to only connect.
    identity: what this side's connections are named, and answers to it are addressed by.
    on_round: called by the channel's thread after each wait; returns the longest time to wait next, in seconds.
    """

    def __init__(self, host: str | None, identity: str, on_round: Callable[[Arrived], float]) -> None:
        self._identity = identity.encode()
        self._on_round = on_round
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self.address = ""
        if host is not None:
            self._listen(host)
        self._keys = zmq.curve_keypair()
        self._dialled: dict[str, _Dialled] = {}
        self._outgoing: deque[tuple[str, str | None, bytes]] = deque()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stop = threading.Event()
        self.dropped = 0
        self.failed_rounds = 0
        self._thread = threading.Thread(target=self._run, name="pdkv-control", daemon=True)

    def _listen(self, host: str) -> None:
        self._router = self._context.socket(zmq.ROUTER)
        public_key, self._router.curve_secretkey = zmq.curve_keypair()
        self._router.curve_server = True
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that connects again keeps its name
        self._router.setsockopt(zmq.IPV6, int(":" in host))
        try:
            self._router.bind(_path(host, 0))
        except zmq.ZMQError as error:
            raise TransportError(
                f"no port to listen on at {host!r} ({error}); set VLLM_NIXL_SIDE_CHANNEL_HOST to one of this host."
            ) from error
        port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
        self.address = f"{_path(host, int(port))} {public_key.decode()}"

    def start(self) -> None:
        """Begin to send and receive."""
        self._thread.start()

    def send(self, engine_id: str, address: str | None, frame: bytes) -> None:
        """Queue a frame, from any thread: to a dialled `address`, or, where None, over the connection it came by."""
        self._outgoing.append((engine_id, address, frame))
        self.wake()

    def wake(self) -> None:
        """Have the thread make a round now."""
        with contextlib.suppress(BlockingIOError):  # full: it is about to wake up
            os.write(self._wake_w, b"\0")

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread and close all sockets. Idempotent; what is queued is lost."""
        if self._stop.is_set():
            return
        self._stop.set()
        self.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    # The thread.

    def _run(self) -> None:
        wait_s = 0.0
        try:
            while not self._stop.is_set():
                self._wait(wait_s)
                wait_s = self._make_round(self._receive())
                self._flush()
                self._close_unused()
        except Exception:
            logger.exception("the control channel has ended; requests to and from pdkv peers will time out")
        finally:
            for dialled in list(self._dialled):
                self._hang_up(dialled)
            if self._router is not None:
                self._router.close(0)
            self._context.term()

    def _make_round(self, arrived: Arrived) -> float:
        """An error in one round must not keep leases from running out: it is counted, and the next round comes."""
        try:
            return self._on_round(arrived)
        except Exception:
            self.failed_rounds += 1
            logger.exception("a round of the control channel failed, for the %dth time; it goes on", self.failed_rounds)
            return AFTER_FAILURE_S

    def _wait(self, wait_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_r, select.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        for dialled in self._dialled.values():
            poller.register(dialled.socket, zmq.POLLIN)
            poller.register(dialled.monitor, zmq.POLLIN)
        poller.poll(max(0.0, wait_s) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 65536)

    def _receive(self) -> Arrived:
        now = time.monotonic()
        for_decode: list[bytes] = []
        lost: list[str] = []
        for dialled in self._dialled.values():
            for_decode += _frames(dialled.socket)
            self._watch(dialled, now)
            if dialled.down_since is not None and now - dialled.down_since >= LOST_AFTER_S:
                lost += dialled.engines
                dialled.engines, dialled.down_since = set(), now
        return Arrived([] if self._router is None else _frames(self._router), for_decode, lost)

    @staticmethod
    def _watch(dialled: _Dialled, now: float) -> None:
        while dialled.monitor.poll(0):
            event = recv_monitor_message(dialled.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                dialled.down_since = None
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED) and dialled.down_since is None:
                dialled.down_since = now

    def _flush(self) -> None:
        while self._outgoing:
            engine_id, address, frame = self._outgoing.popleft()
            try:
                if address is not None:
                    self._dial(engine_id, address).socket.send(frame, zmq.NOBLOCK)
                elif self._router is not None:
                    self._router.send_multipart([engine_id.encode(), frame], zmq.NOBLOCK)
            except (zmq.ZMQError, ValueError):
                self.dropped += 1  # a full queue or a bad address; what matters is sent again

    def _dial(self, engine_id: str, address: str) -> _Dialled:
        dialled = self._dialled.get(address)
        if dialled is None:
            path, _, public_key = address.rpartition(" ")
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, self._identity)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
            socket.setsockopt(zmq.IPV6, int("[" in address))
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            try:
                socket.curve_serverkey = public_key.encode()
                socket.curve_publickey, socket.curve_secretkey = self._keys
                monitor = socket.get_monitor_socket(_WATCHED)
                socket.connect(path)
            except (zmq.ZMQError, ValueError):
                socket.disable_monitor()
                socket.close(0)
                raise
            dialled = _Dialled(socket, monitor, time.monotonic())
            self._dialled[address] = dialled
        dialled.used_at = time.monotonic()
        dialled.engines.add(engine_id)
        return dialled

    def _close_unused(self) -> None:
        now = time.monotonic()
        for address in [a for a, dialled in self._dialled.items() if now - dialled.used_at > UNUSED_AFTER_S]:
            self._hang_up(address)

    def _hang_up(self, address: str) -> None:
        dialled = self._dialled.pop(address)
        dialled.socket.disable_monitor()
        dialled.socket.close(0)


def _path(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    """What waits in a socket, the last part of each message."""
    frames: list[bytes] = []
    while len(frames) < _MAX_FRAMES:
        try:
            frames.append(socket.recv_multipart(zmq.NOBLOCK)[-1])
        except zmq.Again:
            break
    return frames
