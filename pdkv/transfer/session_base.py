"""The work of a session: messages to the state machines, what they want done to the carrier and the transport."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Literal

from pdkv.errors import GeometryError, PdkvError, ProtocolError, StaleGenerationError, StateError, TransferTimeoutError
from pdkv.transfer import actions as do
from pdkv.transfer.admission import Admission
from pdkv.transfer.carrier import MessageCarrier
from pdkv.transfer.clock import Clock, SystemClock, earliest
from pdkv.transfer.consumer import Consumer
from pdkv.transfer.consumer_state import ConsumerSettings
from pdkv.transfer.counters import Counters
from pdkv.transfer.endpoint import Endpoint
from pdkv.transfer.hosting import Registration, TransportHost
from pdkv.transfer.meetings import Meetings
from pdkv.transfer.messages import (
    Ack,
    AnyMessage,
    EngineRef,
    FailCode,
    Handshake,
    Keyed,
    Refuse,
    Renew,
    TransferKey,
    Welcome,
)
from pdkv.transfer.producer import Producer
from pdkv.transfer.producer_books import ProducerSettings
from pdkv.transfer.transport import Transfer, TransferState

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode", "both"]
Event = do.Loaded | do.Failed | do.Recompute | do.FreeBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """`decode.mode` is that of both sides.

    Attributes:
        max_waiting: requests on D that may wait for KV; further ones fail with NO_ROOM.
        connect_s, close_s: the longest waits for a peer's transport, and for the end of the own one, in seconds.
    """

    prefill: ProducerSettings = field(default_factory=ProducerSettings)
    decode: ConsumerSettings = field(default_factory=ConsumerSettings)
    max_waiting: int = 4096
    connect_s: float = 5.0
    close_s: float = 5.0


class SessionBase:
    """What :class:`pdkv.transfer.session.Session` stands on. Subclasses call under the lock."""

    def __init__(
        self,
        host: TransportHost,
        carrier: MessageCarrier,
        *,
        role: Role = "both",
        settings: SessionSettings | None = None,
        clock: Clock | None = None,
        counters: Counters | None = None,
    ) -> None:
        registration = host.registration
        if registration is None:
            raise StateError("the host has registered no KV cache yet; register it before a session is made.")
        self.settings = settings or SessionSettings()
        self.counters = counters or Counters()
        self.host, self.carrier = host, carrier
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._is_pull = self.settings.decode.mode == "pull"
        me, descriptor = registration.engine, registration.descriptor
        self._producer = self._consumer = None
        if role != "decode":
            self._producer = Producer(self._clock, me, descriptor, self.settings.prefill, self.counters)
        if role != "prefill":
            self._consumer = Consumer(self._clock, me, descriptor, self.settings.decode, self.counters)
        self._admission = Admission(self._clock, self.counters, self.settings.max_waiting)
        self._running: dict[TransferKey, Transfer] = {}
        self._meetings = Meetings()
        self._events: list[Event] = []
        self._rebuilding = False

    @property
    def _endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(end for end in (self._producer, self._consumer) if end is not None)

    def _work(self) -> bool:
        """Everything that can be done now, without waiting. Whether anything was."""
        self._finish_rebuilding()
        messages = self.carrier.receive()
        for message in messages:
            self._received(message)
        self.host.progress()
        moved = self._poll_meetings() | self._poll_transfers()
        for endpoint in self._endpoints:
            endpoint.tick()
        return self._act() or bool(messages) or moved

    def _next_deadline(self) -> float | None:
        return earliest(*(endpoint.next_deadline() for endpoint in self._endpoints))

    # Messages.

    def _received(self, message: AnyMessage) -> None:
        endpoint = self._addressee(message)
        if endpoint is None:
            self.counters.count("unexpected_messages")
            return
        endpoint.received(message)
        if isinstance(message, Refuse) and not endpoint.knows(message.meant.engine_id):
            self._give_up_meeting(message.meant.engine_id)
            self.host.disconnect(message.meant.engine_id)

    def _addressee(self, message: AnyMessage) -> Producer | Consumer | None:
        """P's half or D's. What both may get is D's word where it makes a claim, and P's where it makes none."""
        if self._producer is None or self._consumer is None:
            return self._producer or self._consumer
        if isinstance(message, Ack):
            return self._consumer if self._consumer.awaits_ack(message) else self._producer
        if isinstance(message, Handshake | Renew):
            return self._producer
        if isinstance(message, Welcome | Refuse):
            return self._consumer
        return self._producer if isinstance(message, Keyed) and message.claim is not None else self._consumer

    # Actions.

    def _act(self) -> bool:
        """Do what the state machines want; doing it may make them want more."""
        acted = False
        while todo := [(endpoint, action) for endpoint in self._endpoints for action in endpoint.take_actions()]:
            acted = True
            for endpoint, action in todo:
                self._do(endpoint, action)
        return acted

    def _do(self, endpoint: Endpoint, action: do.Action) -> None:
        match action:
            case do.Send():
                self._send(action)
            case do.AddPeer():
                self._connect(endpoint, action)
            case do.PostRead() | do.PostWrite():
                self._post(action)
            case do.AbandonRead():
                self._abandon(action.key)
            case do.RebuildAgent():
                self._rebuild(action.reason)
            case do.FreeBlocks():
                if endpoint is self._producer:
                    self.host.withdraw(action.block_ids)
                self._events.append(action)
            case do.Loaded() | do.Failed() | do.Recompute():
                self._admission.leave(action.request_id)
                self._events.append(action)

    def _send(self, action: do.Send) -> None:
        try:
            if not self.carrier.send(action.message):
                self.counters.count("messages_dropped")  # repeated where it matters
        except ProtocolError as error:
            self.counters.count("messages_too_large")
            logger.error("A message to engine %s is not sent: %s", action.engine_id, error)

    def _connect(self, endpoint: Endpoint, action: do.AddPeer) -> None:
        """Only who posts transfers needs to reach the other side's memory."""
        posts = self._consumer if self._is_pull else self._producer
        if endpoint is not posts or self._rebuilding:
            return
        self._give_up_meeting(action.peer.engine_id)
        try:
            connecting = self.host.connect(action.peer, action.descriptor, timeout_s=self.settings.connect_s)
        except PdkvError as error:
            self._not_connected(action.peer, error)
            return
        if connecting is None:
            self._connected(action.peer)
        else:
            self._meetings.begun(action.peer, connecting)
            self._poll_meetings()

    def _poll_meetings(self) -> bool:
        """See how peers stand who are being connected to; whether one is, or cannot be."""
        ended = self._meetings.poll()
        for peer, error, posts in ended:
            if error is None:
                self._connected(peer)
                for action in posts:
                    self._post(action)
            else:
                for action in posts:
                    self._ended(action.key, False, _code_of(error), f"the peer cannot be reached: {error}")
                self._not_connected(peer, error)
        return bool(ended)

    def _connected(self, peer: EngineRef) -> None:
        if self._consumer is not None and self.host.fences_reads(peer):
            self._consumer.reads_fenced(peer)

    def _not_connected(self, peer: EngineRef, error: PdkvError) -> None:
        self.counters.count("peers_refused_by_transport")
        logger.error("Engine %s cannot be reached by the transport: %s", peer.engine_id, error)
        if self._is_pull and self._consumer is not None:
            self._consumer.peer_lost(peer.engine_id, _code_of(error), str(error))
        elif not self._is_pull and self._producer is not None:
            self._producer.peer_unreached(peer)

    def _give_up_meeting(self, engine_id: str) -> None:
        for action in self._meetings.leave(engine_id):
            self._ended(action.key, False, FailCode.POST_FAILED, "its peer was given up before it was connected")

    def _post(self, action: do.PostRead | do.PostWrite) -> None:
        if self._rebuilding:
            return  # the state machine tries again when the agent is there
        if self._meetings.put_off(action):
            return
        post = self.host.read if isinstance(action, do.PostRead) else self.host.write
        try:
            transfer = post(action.peer, action.pairs)
        except PdkvError as error:
            self.counters.count("posts_refused_by_transport")
            logger.warning("A transfer of request %s is not posted: %s", action.key.request_id, error)
            code = FailCode.INCOMPATIBLE if isinstance(error, GeometryError) else FailCode.POST_FAILED
            self._ended(action.key, False, code, f"the transport did not take the transfer: {error}")
            return
        self._running[action.key] = transfer
        self._poll_transfers()

    def _abandon(self, key: TransferKey) -> None:
        if self._meetings.forget(key):
            self._ended(key, False, FailCode.TRANSFER_FAILED, "it was abandoned before it was posted")
            return
        transfer = self._running.get(key)
        if transfer is not None and transfer.abandon():
            del self._running[key]
            self._ended(key, False, FailCode.TRANSFER_FAILED, "it was abandoned")

    def _poll_transfers(self) -> bool:
        """Whether one ended, or moved because it was polled."""
        worked = False
        for key, transfer in list(self._running.items()):
            state = transfer.poll()
            if state is TransferState.RUNNING:
                worked = worked or transfer.moves_in_poll
                continue
            worked = True
            del self._running[key]
            self._ended(key, state is TransferState.DONE, transfer.code, transfer.reason)
        return worked

    def _ended(self, key: TransferKey, ok: bool, code: FailCode, reason: str) -> None:
        if self._is_pull and self._consumer is not None:
            self._consumer.read_ended(key, ok, code=code, reason=reason)
        elif self._producer is not None:
            self._producer.write_ended(key, ok, code=code, reason=reason)

    def _rebuild(self, reason: str) -> None:
        if self._rebuilding or self.host.registration is None:
            return
        logger.warning("The transport's agent is destroyed and built again: %s", reason)
        self._rebuilding = True
        self.host.rebuild(timeout_s=self.settings.close_s)
        self._forget_transfers()
        self._finish_rebuilding()

    def _forget_transfers(self) -> None:
        """The agent is gone, and with it all that it did."""
        self._running.clear()
        self._meetings.clear()

    def _finish_rebuilding(self) -> None:
        if self._rebuilding and (found := self.host.registration) is not None:
            self._rebuilding = False
            self._tell_registration(found)

    def _tell_registration(self, found: Registration) -> None:
        for endpoint in (self._producer, self._consumer):
            if endpoint is not None:
                endpoint.agent_rebuilt(found.engine.generation, found.descriptor)


def _code_of(error: PdkvError) -> FailCode:
    """What a transport's refusal to connect means for the requests that need it."""
    match error:
        case GeometryError():
            return FailCode.INCOMPATIBLE
        case StaleGenerationError():
            return FailCode.STALE_GENERATION
        case TransferTimeoutError():
            return FailCode.TIMED_OUT
        case _:
            return FailCode.PEER_LOST
