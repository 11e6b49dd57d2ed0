"""The handshake that vLLM's side channel serves around a sleep, and stock peers of push. No engine is started."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import zmq
from engine import free_port

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from pdkv.errors import ConnectorError
from pdkv_connectors.vllm.serving import WITHDRAWN, ServingScheduler, SleepingPushWorker

pytestmark = pytest.mark.vllm

RANK = (0, 0)


class Scheduler(ServingScheduler, NixlBaseConnectorScheduler):
    """The stock scheduler's side channel, and nothing else of it."""

    def __init__(self, port: int) -> None:
        self._served, self.engine_id = {}, "engine"
        self._handshake_data: dict[Any, bytes] = {}
        self._registration_generation = 0
        self._nixl_handshake_listener_t = None
        self._stop_event = threading.Event()
        self.side_channel_host, self.side_channel_port = "127.0.0.1", port


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler(free_port())
    yield made
    made.shutdown()


def ask(scheduler: Scheduler, timeout_s: float = 20.0) -> NixlHandshakePayload:
    """What a peer is answered."""
    with zmq.Context() as context, context.socket(zmq.REQ) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVTIMEO, round(1000 * timeout_s))
        peer.connect(f"tcp://127.0.0.1:{scheduler.side_channel_port}")
        peer.send(msgspec.msgpack.encode((GET_META_MSG, *RANK)))
        return msgspec.msgpack.decode(peer.recv_multipart()[0], type=NixlHandshakePayload)


def payload(agent: str) -> NixlHandshakePayload:
    """What a worker gives; the rest of the metadata does not matter here."""
    return NixlHandshakePayload("hash", msgspec.msgpack.encode({"engine_id": "engine", "agent": agent}))


def served(scheduler: Scheduler) -> dict[str, str]:
    return dict(msgspec.msgpack.decode(ask(scheduler).agent_metadata_bytes))


def test_what_is_served_is_replaced_when_the_agent_is_and_stock_peers_meet_another_engine(
    scheduler: Scheduler,
) -> None:
    for agent, engine_id in (("first", "engine"), ("second", "engine#1"), ("second", "engine#1"), ("3rd", "engine#2")):
        scheduler.set_xfer_handshake_metadata({RANK: payload(agent)})
        assert served(scheduler) == {"engine_id": engine_id, "agent": agent}
        assert scheduler.engine_id == engine_id


def test_a_withdrawn_handshake_tells_the_peer_why_and_gives_it_nothing(scheduler: Scheduler) -> None:
    scheduler.set_xfer_handshake_metadata({RANK: payload("first")})
    scheduler.withdraw_handshake()
    answer = ask(scheduler)
    assert (answer.compatibility_hash, answer.agent_metadata_bytes) == (WITHDRAWN, b"")
    scheduler.set_xfer_handshake_metadata({RANK: payload("second")})
    assert served(scheduler)["agent"] == "second"


def test_a_port_that_somebody_listens_on_is_refused_at_once_in_a_sentence_that_says_what_to_do(
    scheduler: Scheduler,
) -> None:
    with (
        socket.create_server(("127.0.0.1", scheduler.side_channel_port)),
        pytest.raises(ConnectorError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use; .*_PORT"),
    ):
        scheduler.set_xfer_handshake_metadata({RANK: payload("first")})


#: No handshake, and one for a rank that is not there.
STRANGE = ([b"x"], [b"", b""], [b"", b"\xc1"], [b"", b"a", b"b"], [b"", msgspec.msgpack.encode((GET_META_MSG, 7, 9))])


def test_what_strangers_say_to_the_side_channel_does_not_end_it(scheduler: Scheduler) -> None:
    scheduler.set_xfer_handshake_metadata({RANK: payload("first")})
    for message in STRANGE:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 20_000)
            stranger.connect(f"tcp://127.0.0.1:{scheduler.side_channel_port}")
            stranger.send_multipart(message)
        for _ in range(20):  # one that asks just as the listener ends is not answered, and asks again
            with suppress(zmq.Again):
                assert ask(scheduler, timeout_s=1.0).agent_metadata_bytes == payload("first").agent_metadata_bytes
                break
        else:
            pytest.fail(f"nobody is answered after {message}")


@pytest.fixture
def stock_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which methods of the stock push worker were reached."""
    calls: list[str] = []
    for name in ("_send_registration_to_p", "_do_start_push_kv"):
        monkeypatch.setattr(NixlPushConnectorWorker, name, lambda *_, name=name: calls.append(name))
    return calls


def push_worker(*, may_sleep: bool) -> SleepingPushWorker:
    worker = object.__new__(SleepingPushWorker)
    worker._may_sleep, worker._failed_recv_reqs = may_sleep, queue.Queue()
    worker._handshake_initiation_executor = None  # for the stock destructor
    return worker


@pytest.mark.parametrize("may_sleep", [True, False])
def test_push_with_a_stock_peer_is_refused_where_the_engine_may_sleep(stock_calls: list[str], may_sleep: bool) -> None:
    worker = push_worker(may_sleep=may_sleep)
    worker._send_registration_to_p("r1", {"remote_engine_id": "stock"})
    worker._do_start_push_kv("r2", ([1],), {"decode_engine_id": "stock"})
    assert stock_calls == ([] if may_sleep else ["_send_registration_to_p", "_do_start_push_kv"])
    assert list(worker._failed_recv_reqs.queue) == (["r1"] if may_sleep else [])
